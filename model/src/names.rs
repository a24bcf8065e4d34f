//! The names of a family's tensors and configuration keys.

/// The names of a family's tensors, as on the hub.
#[derive(Clone, Debug)]
pub struct Names {
    /// The Mixture-of-Experts layer within a layer, where experts are separate.
    pub moe: &'static str,
    /// The projections of an expert.
    pub expert: MlpNames,
    /// The projections of a dense layer and of a shared expert.
    pub mlp: MlpNames,
    /// The configuration key of the number of experts.
    pub experts_key: &'static str,
    /// The configuration key of an expert's width.
    pub width_key: &'static str,
}

/// The names of an MLP's projections.
#[derive(Clone, Debug)]
pub struct MlpNames {
    /// The projection that goes through SiLU.
    pub gate: &'static str,
    /// The projection it is multiplied by.
    pub up: &'static str,
    /// The projection back to the residual stream.
    pub down: &'static str,
}

impl MlpNames {
    /// The names that most families use.
    pub const USUAL: MlpNames = MlpNames { gate: "gate_proj", up: "up_proj", down: "down_proj" };
}

impl Names {
    /// The Mixture-of-Experts layer within a layer, where experts are fused (and in the memory of transformers).
    pub const FUSED_MOE: &'static str = "mlp";
}
