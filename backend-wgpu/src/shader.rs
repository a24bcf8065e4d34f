//! From a shader's file to a compiled pipeline: the declarations that every shader shares are written here, so that a
//! struct or a binding is declared once.
//!
//! A binding `x` becomes `x_at(i)`: the bits of element i as f32 for a float tensor, else the integer; `x_set(i, v)` if
//! it is written, with one rounding for bf16, and `x_set_two(i, v, w)` for elements i and i + 1 of a float tensor that
//! must be there; and `x_word(i)` and `x_unit(i)`, the 4 and the 16 bytes in which element i lies, if it is read in
//! units. Elements smaller than a word share words between invocations, so they are written with an atomic exclusive-or
//! of the bits to change; nobody else changes those bits.
//!
//! Whether an optional binding has a tensor is known when the shader runs, not before: drivers take their time to
//! compile a shader, so it is the same with and without.

use std::fmt::Write;

pub(crate) use dropless_core::params;
use dropless_core::{DType, Error, Result, Tensor};

use crate::BACKEND;
use crate::device::one_line;
use crate::expand::expand;

/// How a shader uses a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// `x_at`.
    Read,
    /// `x_at`, `x_word` and `x_unit`.
    ReadUnits,
    /// `x_set`.
    Write,
    /// Both.
    InPlace,
    /// `x_max` and `x_count` (add, and return what was there), by many invocations at once.
    Atomic,
}

/// A tensor that a shader works on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub(crate) name: &'static str,
    pub(crate) access: Access,
    /// Element types it is used with.
    pub(crate) types: &'static [DType],
    /// Whether it may be absent: then `x_given()` is false, `x_at` gives 0 and `x_set` does nothing.
    pub(crate) optional: bool,
}

pub(crate) const FLOAT: &[DType] = &[DType::F32, DType::Bf16];
pub(crate) const F32: &[DType] = &[DType::F32];
pub(crate) const U32: &[DType] = &[DType::U32];

impl Access {
    pub(crate) fn reads_only(self) -> bool {
        matches!(self, Access::Read | Access::ReadUnits)
    }
}

impl Binding {
    pub(crate) const fn read(name: &'static str, types: &'static [DType]) -> Binding {
        Binding { name, access: Access::Read, types, optional: false }
    }

    pub(crate) const fn read_units(name: &'static str, types: &'static [DType]) -> Binding {
        Binding { name, access: Access::ReadUnits, types, optional: false }
    }

    pub(crate) const fn write(name: &'static str, types: &'static [DType]) -> Binding {
        Binding { name, access: Access::Write, types, optional: false }
    }

    pub(crate) const fn in_place(name: &'static str, types: &'static [DType]) -> Binding {
        Binding { name, access: Access::InPlace, types, optional: false }
    }

    pub(crate) const fn atomic(name: &'static str, types: &'static [DType]) -> Binding {
        Binding { name, access: Access::Atomic, types, optional: false }
    }

    pub(crate) const fn optional(self) -> Binding {
        Binding { optional: true, ..self }
    }

    /// The type of the tensor that stands here; without one, the last that could.
    pub(crate) fn element(&self, tensor: Option<&Tensor>) -> DType {
        tensor.map_or(self.types[self.types.len() - 1], Tensor::dtype)
    }

    /// Whether a tensor of this type (or none) may stand here.
    pub(crate) fn accepts(&self, dtype: Option<DType>) -> bool {
        dtype.map_or(self.optional, |dtype| self.types.contains(&dtype))
    }
}

/// A shader before its element types are known.
#[derive(Debug)]
pub(crate) struct Shader {
    /// The op; also the file's name.
    pub(crate) name: &'static str,
    /// Files that it uses, in order, and its own file last.
    pub(crate) files: &'static [&'static str],
    /// The fields of its parameters.
    pub(crate) params: &'static [&'static str],
    pub(crate) bindings: &'static [Binding],
    /// The names of constants that a dispatch gives values.
    pub(crate) constants: &'static [&'static str],
}

/// The shared files.
pub(crate) const PRELUDE: &str = include_str!("../../shaders/prelude.wgsl");
pub(crate) const FORMATS: &str = include_str!("../../shaders/formats.wgsl");
pub(crate) const MMA: &str = include_str!("../../shaders/mma.wgsl");
pub(crate) const MATH: &str = include_str!("../../shaders/math.wgsl");
pub(crate) const BALANCE: &str = include_str!("../../shaders/balance.wgsl");
pub(crate) const CHOICES: &str = include_str!("../../shaders/choices.wgsl");
pub(crate) const SCAN: &str = include_str!("../../shaders/scan.wgsl");
pub(crate) const BLOCKS: &str = include_str!("../../shaders/blocks.wgsl");
pub(crate) const INTEGERS: &str = include_str!("../../shaders/integers.wgsl");
pub(crate) const OPERANDS: &str = include_str!("../../shaders/operands.wgsl");
pub(crate) const PHILOX: &str = include_str!("../../shaders/philox.wgsl");
pub(crate) const ROTATE: &str = include_str!("../../shaders/rotate.wgsl");
pub(crate) const ROW: &str = include_str!("../../shaders/row.wgsl");
pub(crate) const TREE: &str = include_str!("../../shaders/tree.wgsl");

/// A shader with its element types and constants: what a pipeline is compiled from.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    pub(crate) shader: &'static Shader,
    pub(crate) types: Vec<DType>,
    pub(crate) constants: Vec<u32>,
}

impl PartialEq for Variant {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.shader, other.shader) && self.types == other.types && self.constants == other.constants
    }
}

impl Eq for Variant {}

impl std::hash::Hash for Variant {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.shader.name.hash(state);
        self.types.hash(state);
        self.constants.hash(state);
    }
}

/// Words of the immediate data before the parameters: the first element of each binding, or [`ABSENT`].
pub(crate) const OFFSET_WORDS: usize = 8;
/// Stands for the first element of a binding without a tensor.
pub(crate) const ABSENT: u32 = u32::MAX;

/// What every shader starts with. `linear` undoes the folding of [`crate::dispatch`].
const HEADER: &str = "struct Given {
    offsets: array<vec4<u32>, 2>,
    params: Params,
}
var<immediate> given: Given;

fn linear(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + group.y * groups.x;
}
";

impl Variant {
    /// The WGSL text that is compiled.
    pub(crate) fn source(&self) -> String {
        let named = self.shader.constants.iter().copied().zip(self.constants.iter().copied());
        expand(&self.text(), &named.collect::<Vec<_>>())
    }

    /// The WGSL text with every loop and branch of its files.
    pub(crate) fn text(&self) -> String {
        let fields: String = self.shader.params.iter().map(|field| format!("    {field}: u32,\n")).collect();
        let mut text = format!("struct Params {{\n{fields}}}\n{HEADER}");
        for (name, value) in self.shader.constants.iter().zip(&self.constants) {
            let _ = writeln!(text, "const {name}: u32 = {value}u;");
        }
        for (slot, (binding, dtype)) in self.shader.bindings.iter().zip(&self.types).enumerate() {
            text.push('\n');
            declare(&mut text, *binding, *dtype, slot);
        }
        for file in self.shader.files {
            text.push('\n');
            text.push_str(file);
        }
        text
    }
}

fn declare(text: &mut String, binding: Binding, dtype: DType, slot: usize) {
    let Binding { name, access, optional, .. } = binding;
    let offset = format!("given.offsets[{}][{}]", slot / 4, slot % 4);
    let units = access == Access::ReadUnits;
    let shared_words = access == Access::Atomic || !access.reads_only() && dtype.size() < 4;
    let mode = if access.reads_only() { "read" } else { "read_write" };
    let element = match access {
        _ if shared_words => "atomic<u32>",
        Access::ReadUnits => "vec4<u32>",
        _ => "u32",
    };
    let _ = writeln!(text, "@group(0) @binding({slot}) var<storage, {mode}> {name}: array<{element}>;");
    if optional {
        let _ = writeln!(text, "fn {name}_given() -> bool {{\n    return {offset} != {ABSENT}u;\n}}");
    }
    if access == Access::Atomic {
        for (suffix, function) in [("max", "atomicMax"), ("count", "atomicAdd")] {
            let _ = writeln!(
                text,
                "fn {name}_{suffix}(i: u32, value: u32) -> u32 {{\n    return {function}(&{name}[i + {offset}], value);\n}}"
            );
        }
        return;
    }
    if access != Access::Write {
        // Logarithm of the elements in a word.
        let shift = 2 - dtype.size().trailing_zeros();
        let word = match access {
            _ if shared_words => format!("atomicLoad(&{name}[at >> {shift}u])"),
            Access::ReadUnits => format!("{name}[at >> {}u][(at >> {shift}u) & 3u]", shift + 2),
            _ => format!("{name}[at >> {shift}u]"),
        };
        if units {
            let unit = format!("{name}[at >> {}u]", shift + 2);
            for (part, ty, value) in [("word", "u32", &word), ("unit", "vec4<u32>", &unit)] {
                let _ = writeln!(
                    text,
                    "fn {name}_{part}(i: u32) -> {ty} {{\n    let at = i + {offset};\n    return {value};\n}}"
                );
            }
        }
        let value = match dtype.size() {
            4 => word,
            2 => format!("({word} >> ((at & 1u) << 4u)) << 16u"),
            _ => format!("({word} >> ((at & 3u) << 3u)) & 0xFFu"),
        };
        let value = if optional { format!("select(0u, {value}, {name}_given())") } else { value };
        let _ = writeln!(text, "fn {name}_at(i: u32) -> u32 {{\n    let at = i + {offset};\n    return {value};\n}}");
    }
    if !access.reads_only() {
        let body = match dtype.size() {
            4 => format!("    {name}[at] = value;"),
            2 => exchange(name, "bf16_from_f32(value)", "1u", "4u", "0xFFFFu"),
            _ => exchange(name, "value", "2u", "3u", "0xFFu"),
        };
        let body = if optional { format!("    if !{name}_given() {{\n        return;\n    }}\n{body}") } else { body };
        let _ = writeln!(text, "fn {name}_set(i: u32, value: u32) {{\n    let at = i + {offset};\n{body}\n}}");
        if !optional {
            declare_pairs(text, name, dtype, &offset);
        }
    }
}

/// Writes two neighbours at once: a whole word takes no exchange.
fn declare_pairs(text: &mut String, name: &str, dtype: DType, offset: &str) {
    let both = format!("    {name}_set(i, first);\n    {name}_set(i + 1u, second);\n");
    let body = match dtype {
        DType::F32 => both,
        DType::Bf16 => format!(
            "    let at = i + {offset};
    if (at & 1u) == 0u {{
        atomicStore(&{name}[at >> 1u], bf16_from_f32(first) | (bf16_from_f32(second) << 16u));
        return;
    }}
{both}"
        ),
        _ => return,
    };
    let _ = writeln!(text, "fn {name}_set_two(i: u32, first: u32, second: u32) {{\n{body}}}");
}

/// Replaces one part of a word; `parts` and `bits` are logarithms.
fn exchange(name: &str, code: &str, parts: &str, bits: &str, mask: &str) -> String {
    let last = if parts == "1u" { "1u" } else { "3u" };
    format!(
        "    let word = at >> {parts};
    let shift = (at & {last}) << {bits};
    let change = ((atomicLoad(&{name}[word]) >> shift) ^ {code}) & {mask};
    atomicXor(&{name}[word], change << shift);"
    )
}

/// A compiled variant.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) raw: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
}

impl Pipeline {
    /// `source`: the variant's text.
    pub(crate) fn compile(device: &wgpu::Device, variant: &Variant, source: String) -> Result<Pipeline> {
        let name = variant.shader.name;
        let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let entries: Vec<_> = (0..).zip(variant.shader.bindings).map(|(slot, binding)| entry(slot, *binding)).collect();
        let layout =
            device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(name), entries: &entries });
        let words = OFFSET_WORDS + variant.shader.params.len().next_multiple_of(4);
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: u32::try_from(words * 4).expect("a few words"),
        });
        let descriptor =
            wgpu::ShaderModuleDescriptor { label: Some(name), source: wgpu::ShaderSource::Wgsl(source.into()) };
        // A counter in every loop would keep the drivers from unrolling them.
        let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
        // SAFETY: every loop of the shaders ends: its counter moves towards a bound that the loop does not change, or
        // what it counts by doubles, or is used up. All other checks stay on.
        let module = unsafe { device.create_shader_module_trusted(descriptor, checks) };
        let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        match pollster::block_on(scope.pop()) {
            Some(error) => Err(Error::Device { backend: BACKEND, op: name, what: one_line(&error.to_string()) }),
            None => Ok(Pipeline { raw, layout }),
        }
    }
}

fn entry(slot: u32, binding: Binding) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding: slot,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: binding.access.reads_only() },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    }
}
