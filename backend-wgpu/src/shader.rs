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

use dropless_core::DType;
pub(crate) use dropless_core::launch::{Access, Binding, F32, FLOAT, Kernel as Shader, Scalars, U32, Variant, word};
pub(crate) use dropless_core::scalars;

use crate::expand::expand;

/// The shared files.
pub(crate) const PRELUDE: &str = include_str!("../../shaders/prelude.wgsl");
pub(crate) const FORMATS: &str = include_str!("../../shaders/formats.wgsl");
pub(crate) const MMA: &str = include_str!("../../shaders/mma.wgsl");
pub(crate) const EX2: &str = include_str!("../../shaders/ex2.wgsl");
pub(crate) const MATH: &str = include_str!("../../shaders/math.wgsl");
pub(crate) const BALANCE: &str = include_str!("../../shaders/balance.wgsl");
pub(crate) const CHOICES: &str = include_str!("../../shaders/choices.wgsl");
pub(crate) const SCAN: &str = include_str!("../../shaders/scan.wgsl");
pub(crate) const BLOCKS: &str = include_str!("../../shaders/blocks.wgsl");
pub(crate) const INTEGERS: &str = include_str!("../../shaders/integers.wgsl");
pub(crate) const OFFSETS: &str = include_str!("../../shaders/offsets.wgsl");
pub(crate) const OPERANDS: &str = include_str!("../../shaders/operands.wgsl");
pub(crate) const PHILOX: &str = include_str!("../../shaders/philox.wgsl");
pub(crate) const ROTATE: &str = include_str!("../../shaders/rotate.wgsl");
pub(crate) const ROW: &str = include_str!("../../shaders/row.wgsl");
pub(crate) const SIGMOID: &str = include_str!("../../shaders/sigmoid.wgsl");
pub(crate) const TREE: &str = include_str!("../../shaders/tree.wgsl");

/// Words of the immediate data before the parameters: the first element of each binding, or [`ABSENT`].
pub(crate) const OFFSET_WORDS: usize = 8;
/// Stands for the first element of a binding without a tensor.
pub(crate) const ABSENT: u32 = u32::MAX;

/// What every shader starts with. `linear` undoes the folding of [`crate::dispatch`].
const HEADER: &str = "struct Given {
    offsets: array<vec4<u32>, 2>,
    scalars: Scalars,
}
var<immediate> given: Given;

fn linear(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + group.y * groups.x;
}
";

/// The WGSL text of a variant that is compiled.
pub(crate) fn source(variant: &Variant) -> String {
    expand(&text(variant), &variant.constants().collect::<Vec<_>>(), true)
}

/// The WGSL text of a variant as recordings have it, for any implementation of WebGPU: the parameters are a uniform buffer.
pub(crate) fn recorded_source(variant: &Variant) -> String {
    let text = text(variant).replacen("var<immediate> given", "@group(1) @binding(0) var<uniform> given", 1);
    expand(&text, &variant.constants().collect::<Vec<_>>(), false)
}

/// The WGSL text with every loop and branch of its files.
pub(crate) fn text(variant: &Variant) -> String {
    let fields: String = variant.program.scalars.iter().map(|field| format!("    {field}: u32,\n")).collect();
    let mut text = format!("struct Scalars {{\n{fields}}}\n{HEADER}");
    for (name, value) in variant.constants() {
        let _ = writeln!(text, "const {name}: u32 = {value}u;");
    }
    for (slot, (binding, dtype)) in variant.complete().tensors().enumerate() {
        text.push('\n');
        declare(&mut text, *binding, dtype.expect("a complete variant has every type"), slot);
    }
    for file in variant.program.files {
        text.push('\n');
        text.push_str(file);
    }
    text
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
