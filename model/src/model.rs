//! A model of any family over any backend, forward and backward. One [`Model`] is one rank's share: replicated weights in
//! full, and the experts that live there.

use dropless_core::ops::Fill;
use dropless_core::{Backend, DType, Result, Tensor};

use crate::architecture::Architecture;
use crate::context::{Activations, Context, Inputs};
use crate::embedding::Embedding;
use crate::head::{Head, HeadLoss};
use crate::layer::{self, Balancing, Feed, Layer};
use crate::next_token::{self, NextToken};
use crate::nn::{Policy, Tokens};
use crate::options::Options;
use crate::params::{Builder, Id, Params, Spec};
use crate::rope::Tables;
use crate::train_state::TrainState;
use crate::weights::Weights;

/// The losses of a micro-batch on one rank, still on the device.
#[derive(Debug)]
pub struct Losses {
    /// Cross-entropy of each token, f32 `[tokens]`.
    pub tokens: Tensor,
    /// The same of the multi-token-prediction module.
    pub next: Option<Tensor>,
    /// The auxiliary loss of each sequence, one tensor for each MoE layer.
    pub balance: Vec<Tensor>,
}

/// One rank's share of a model.
#[derive(Debug)]
pub struct Model {
    /// Weights.
    pub params: Params,
    /// Gradients and optimizer state, of a model that is trained.
    pub state: Option<TrainState>,
    embedding: Embedding,
    layers: Vec<Layer>,
    head: Head,
    next: Option<NextToken>,
    rope: Tables,
    activations: Activations,
}

/// The parameters of a model, by their place in the arenas.
pub(crate) struct Description {
    table: Id,
    layers: Vec<layer::Description>,
    norm: Id,
    output: Id,
    next: Option<next_token::Description>,
}

impl Description {
    /// Adds a model's parameters to the builder.
    pub(crate) fn of(builder: &mut Builder, model: &Architecture) -> Description {
        let h = model.hidden;
        let table = builder.matrix("model.embed_tokens.weight".into(), &[model.vocab, h]);
        let feeds = model.layers.iter().enumerate();
        let layers = feeds.map(|(i, feed)| layer::describe(builder, model, feed, i)).collect();
        let norm = builder.norm("model.norm.weight".into(), h);
        let output = match model.tied {
            true => table,
            false => builder.matrix("lm_head.weight".into(), &[model.vocab, h]),
        };
        Description { table, layers, norm, output, next: next_token::describe(builder, model) }
    }
}

impl Model {
    /// A model with undefined weights; [`Model::initialise`] or [`crate::hf::WeightFiles::load`] fills them.
    ///
    /// # Errors
    /// [`dropless_core::Error::Capacity`] when the memory is not there, also for the worst case of the experts.
    pub fn new(backend: &dyn Backend, model: &Architecture, options: &Options, tokens: &Tokens) -> Result<Model> {
        let element = options.recipe.element();
        let mut builder = Builder::new(backend);
        let Description { table, layers, norm, output, next } = Description::of(&mut builder, model);
        let params = builder.build(backend, element)?;
        let state = options.training.then(|| TrainState::new(backend, &params, tokens)).transpose()?;
        let weights = Weights { params: &params, state: state.as_ref(), linear_recipe: options.linear_recipe };
        let norm_of = |id| weights.norm(id, model.eps);
        let head = |norm| Ok(Head { norm: norm_of(norm)?, output: weights.get(output)? });
        let built = |d: &layer::Description, feed| d.build(backend, model, feed, options, weights);
        let next = match (next, &model.next) {
            (Some(d), Some(feed)) => Some(NextToken {
                embedding_norm: norm_of(d.embedding_norm)?,
                hidden_norm: norm_of(d.hidden_norm)?,
                project: weights.get(d.project)?,
                layer: built(&d.layer, feed)?,
                head: head(d.head_norm)?,
            }),
            _ => None,
        };
        let model = Model {
            embedding: Embedding { table: weights.get(table)?, element },
            layers: layers.iter().zip(&model.layers).map(|(d, feed)| built(d, feed)).collect::<Result<_>>()?,
            head: head(norm)?,
            next,
            rope: Tables::new(backend, &model.rope, tokens.sequence())?,
            activations: options.activations,
            state,
            params,
        };
        for layer in model.all_layers() {
            if let Feed::Moe(moe) = &layer.feed {
                moe.layer.check_budget(backend, tokens, options.memory_budget)?;
            }
        }
        Ok(model)
    }

    fn all_layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().chain(self.next.iter().map(|n| &n.layer))
    }

    /// Selection bias and expert counts of each MoE layer, in order.
    pub fn balancing(&self) -> impl Iterator<Item = &Balancing> {
        self.all_layers().filter_map(|l| match &l.feed {
            Feed::Moe(moe) => Some(&moe.balancing),
            Feed::Dense(_) => None,
        })
    }

    /// Brings the weights into the form of the products, after the master weights were written from outside.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn refresh(&mut self, backend: &dyn Backend) -> Result<()> {
        self.params.refresh(backend)?;
        self.prepare(backend)
    }

    /// The same after the optimizer changed the weights, which rounds them itself.
    pub(crate) fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        self.layers.iter_mut().chain(self.next.iter_mut().map(|n| &mut n.layer)).try_for_each(|l| l.prepare(backend))
    }

    /// Longest sequence.
    pub(crate) fn positions(&self) -> usize {
        self.rope.cos.rows()
    }

    /// Element type of activations.
    pub(crate) fn element(&self) -> DType {
        self.embedding.element
    }

    pub(crate) fn embed(&self, backend: &dyn Backend, ids: &Tensor) -> Result<Tensor> {
        self.embedding.forward(backend, ids)
    }

    /// The layers of the main model.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter()
    }

    /// What each layer keeps of a token for generation, in elements.
    pub(crate) fn cached_widths(&self) -> impl Iterator<Item = [usize; 2]> {
        self.layers.iter().map(Layer::cached_widths)
    }

    /// Logits of hidden states, f32 `[tokens, vocabulary]`.
    pub(crate) fn logits_of(&self, c: Context<'_>, hidden: &Tensor) -> Result<Tensor> {
        self.head.logits(c, hidden)
    }

    /// A pass that no backward pass follows: nothing is kept, and no choice of experts counts.
    pub(crate) fn inference<'a>(
        &'a self,
        backend: &'a dyn Backend,
        tokens: &'a Tokens,
        inputs: &'a Inputs,
    ) -> Context<'a> {
        let policy = Activations::all(Policy::Recompute);
        Context { backend, tokens, inputs, rope: &self.rope, policy, counted: false }
    }

    /// The hidden state after the last layer of such a pass.
    fn infer<'a>(
        &'a self,
        backend: &'a dyn Backend,
        tokens: &'a Tokens,
        inputs: &'a Inputs,
    ) -> Result<(Context<'a>, Tensor)> {
        let c = self.inference(backend, tokens, inputs);
        let first = self.embedding.forward(backend, &inputs.ids)?;
        let hidden =
            self.layers.iter().try_fold(first, |x, layer| Ok::<_, dropless_core::Error>(layer.forward(c, x)?.0))?;
        Ok((c, hidden))
    }

    /// Logits, f32 `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn logits(&self, backend: &dyn Backend, tokens: &Tokens, inputs: &Inputs) -> Result<Tensor> {
        let (c, hidden) = self.infer(backend, tokens, inputs)?;
        self.head.logits(c, &hidden)
    }

    /// The loss of each token, f32 `[tokens]`; gradients and expert counts stay as they are.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn evaluate(&self, backend: &dyn Backend, tokens: &Tokens, inputs: &Inputs) -> Result<Tensor> {
        let (c, hidden) = self.infer(backend, tokens, inputs)?;
        self.head.evaluate(c, &hidden)
    }

    /// Forward and backward: adds to the gradients and to the expert counts.
    ///
    /// # Errors
    /// Those of the ops; [`dropless_core::Error::Argument`] of a model that is not trained.
    pub fn step(&self, backend: &dyn Backend, tokens: &Tokens, inputs: &Inputs) -> Result<Losses> {
        let c = Context { backend, tokens, inputs, rope: &self.rope, policy: self.activations, counted: true };
        let forward = backend.scope("forward", None);
        let mut hidden = self.embedding.forward(backend, &inputs.ids)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for (index, layer) in self.layers.iter().enumerate() {
            let _scope = backend.scope("layer", Some(index));
            let (y, saved) = layer.forward(c, hidden)?;
            hidden = y;
            layers.push(saved);
        }
        drop(forward);
        let mut balance: Vec<Tensor> = layers.iter().filter_map(|s| s.balance_loss().cloned()).collect();
        let (mut residual, mut next_loss) = (None, None);
        if let (Some(next), Some(more)) = (&self.next, &inputs.next) {
            let _scope = backend.scope("next token", None);
            let step = next.step(c, more, &self.embedding, &hidden)?;
            residual = Some(step.d_hidden);
            next_loss = Some(step.loss);
            balance.extend(step.balance);
        }
        let head = backend.scope("head", None);
        let HeadLoss { loss, mut d_hidden } =
            self.head.step(c, &hidden, &inputs.targets, &inputs.scale, residual.as_ref())?;
        drop(head);
        // The last layers' inputs are let go of as soon as nothing needs them.
        drop((hidden, residual));
        let _backward = backend.scope("backward", None);
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let _scope = backend.scope("layer", Some(index));
            let saved = layers.pop().expect("one for each layer");
            // What the layer before needs travels while this one computes.
            if let Some(before) = layers.last_mut() {
                before.prefetch(backend)?;
            }
            d_hidden = layer.backward(c, &d_hidden, saved)?;
        }
        self.embedding.backward(backend, &inputs.ids, &d_hidden)?;
        Ok(Losses { tokens: loss, next: next_loss, balance })
    }

    /// Sets every gradient and every expert count to zero.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn clear_gradients(&self, backend: &dyn Backend) -> Result<()> {
        if let Some(state) = &self.state {
            state.clear_gradients(backend)?;
        }
        for balancing in self.balancing() {
            Fill { out: &balancing.counts, value: 0.0 }.run(backend)?;
        }
        Ok(())
    }
}

/// The parameters of a whole model, in order, of which nothing is built.
pub(crate) fn specs(model: &Architecture) -> Vec<Spec> {
    let mut builder = Builder::whole();
    Description::of(&mut builder, model);
    builder.into_specs()
}

impl Architecture {
    /// The linear layers that [`Options::linear_recipe`] is for, in order: the names of the tensors that make up the
    /// weight of each, and its rows and columns.
    pub fn linear_layers(&self) -> Vec<(Vec<String>, [usize; 2])> {
        let mut builder = Builder::whole();
        let description = Description::of(&mut builder, self);
        let specs = builder.into_specs();
        let layers = description.layers.iter().chain(description.next.as_ref().map(|next| &next.layer));
        let linear = layers.flat_map(layer::Description::linear).map(|id| &specs[id.0]);
        linear
            .map(|spec| (spec.pieces.iter().map(|(name, _)| name.clone()).collect(), [spec.shape[0], spec.shape[1]]))
            .collect()
    }
}
