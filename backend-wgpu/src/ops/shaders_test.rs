//! Every shader in every variant, as its parser sees it: it is valid, no type in it is a float, and its parameters lie
//! where the launcher puts them.

use dropless_core::DType;
use dropless_core::launch::{Program, Variant};
use naga::proc::Layouter;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, Handle, Module, ScalarKind, ShaderStage, Type, TypeInner, back, front::wgsl};

use super::all;
use crate::shader::{OFFSET_WORDS, recorded_source, source, text};

/// The first type of each binding, and every other type of one binding at a time, under constants that `value` gives to
/// their names.
fn types_under(program: &'static Program, value: impl Fn(&str) -> u32) -> Vec<Variant> {
    let constants: Vec<u32> = program.constants.iter().map(|name| value(name)).collect();
    let first: Vec<DType> = program.tensors.iter().map(|binding| binding.types[0]).collect();
    let mut types = vec![first.clone()];
    for (place, binding) in program.tensors.iter().enumerate() {
        types.extend(binding.types[1..].iter().map(|&other| {
            let mut types = first.clone();
            types[place] = other;
            types
        }));
    }
    types.into_iter().map(|types| Variant::new(program, types.into_iter().map(Some), &constants)).collect()
}

/// Under two choices of constants: 4 is a size of arrays as well as a number of bits.
fn variants(program: &'static Program) -> Vec<Variant> {
    [1, 4].into_iter().flat_map(|value| types_under(program, |_| value)).collect()
}

fn parse(source: &str) -> Module {
    let module = wgsl::parse_str(source).unwrap_or_else(|e| panic!("{}", e.emit_to_string(source)));
    Validator::new(ValidationFlags::all(), Capabilities::IMMEDIATES)
        .validate(&module)
        .unwrap_or_else(|e| panic!("{}", e.emit_to_string(source)));
    module
}

/// Types of a module that hold a float.
fn float_types(module: &Module) -> Vec<String> {
    let is_float = |kind| matches!(kind, ScalarKind::Float | ScalarKind::AbstractFloat);
    let found = module.types.iter().filter(|(_, ty)| match ty.inner {
        TypeInner::Scalar(scalar)
        | TypeInner::Vector { scalar, .. }
        | TypeInner::Matrix { scalar, .. }
        | TypeInner::Atomic(scalar)
        | TypeInner::ValuePointer { scalar, .. } => is_float(scalar.kind),
        TypeInner::Pointer { .. } | TypeInner::Array { .. } | TypeInner::Struct { .. } => false,
        // Images, samplers and the like have no place here either.
        _ => true,
    });
    let types = found.map(|(_, ty)| format!("{:?}", ty.inner));
    let literals = module
        .functions
        .iter()
        .map(|(_, function)| function)
        .chain(module.entry_points.iter().map(|entry| &entry.function))
        .flat_map(|function| function.expressions.iter())
        .chain(module.global_expressions.iter())
        .filter_map(|(_, expression)| match expression {
            naga::Expression::Literal(literal) if is_float(literal.scalar().kind) => Some(format!("{literal:?}")),
            naga::Expression::As { kind, .. } if is_float(*kind) => Some("a conversion to a float".into()),
            _ => None,
        });
    types.chain(literals).collect()
}

/// A file that no shader is compiled from, or a shader that does not end with the file of its name.
#[test]
fn every_file_belongs_to_a_shader_that_is_compiled_here() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../shaders");
    let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let used = all().iter().any(|shader| shader.files.contains(&&*read(&path)));
        assert!(used, "no shader is compiled from {}", path.display());
    }
    for shader in all() {
        let own = std::path::Path::new(folder).join(shader.name).with_extension("wgsl");
        assert_eq!(shader.files.last(), Some(&&*read(&own)), "{}: its own file comes last", shader.name);
    }
}

#[test]
fn no_shader_has_a_float() {
    for shader in all() {
        for variant in variants(shader) {
            // What is compiled, and the branches that these constants leave out.
            for text in [source(&variant), text(&variant)] {
                let floats = float_types(&parse(&text));
                assert!(floats.is_empty(), "{}: {floats:?} in {variant:?}", shader.name);
            }
        }
    }
}

/// The control: a float anywhere is found.
#[test]
fn floats_are_found() {
    for source in [
        "fn f() -> f32 { return 1.0; }",
        "fn f(a: u32) -> u32 { return u32(f32(a)); }",
        "fn f(a: u32) -> u32 { return bitcast<u32>(bitcast<f32>(a) * bitcast<f32>(a)); }",
        "var<private> a: array<vec2<f32>, 4>;",
        "fn f() { let a = 0.5; }",
    ] {
        assert!(!float_types(&parse(source)).is_empty(), "{source}");
    }
}

/// The fields of a struct that do not lie where the launcher puts these, one word after the other.
fn misplaced(module: &Module, ty: Handle<Type>, fields: &[&str]) -> Vec<String> {
    let TypeInner::Struct { members, .. } = &module.types[ty].inner else { panic!("a struct") };
    assert_eq!(members.len(), fields.len());
    let places = members.iter().zip(fields).enumerate();
    let wrong = places.filter(|(place, (member, field))| {
        member.name.as_deref() != Some(**field) || member.offset as usize != place * 4
    });
    wrong.map(|(place, (member, field))| format!("{:?}, not {field}, at word {place}", member.name)).collect()
}

#[test]
fn parameters_lie_where_the_launcher_puts_them() {
    for shader in all() {
        let module = parse(&source(&variants(shader)[0]));
        let given = module.global_variables.iter().find(|(_, v)| v.space == AddressSpace::Immediate).unwrap().1;
        let TypeInner::Struct { members, .. } = &module.types[given.ty].inner else { panic!("a struct") };
        let scalars = members.iter().find(|member| member.name.as_deref() == Some("scalars")).unwrap();
        assert_eq!(scalars.offset as usize, OFFSET_WORDS * 4, "{}", shader.name);
        let misplaced = misplaced(&module, scalars.ty, shader.scalars);
        assert!(misplaced.is_empty(), "{}: {misplaced:?}", shader.name);
    }
}

/// The control: shuffled and padded fields are found.
#[test]
fn misplaced_fields_are_found() {
    for source in ["struct P { b: u32, a: u32 }", "struct P { a: u32, @align(16) b: u32 }"] {
        let module = parse(&format!("{source}\nvar<private> p: P;"));
        let ty = module.global_variables.iter().next().unwrap().1.ty;
        assert!(!misplaced(&module, ty, &["a", "b"]).is_empty(), "{source}");
    }
}

#[test]
fn dispatches_fit_the_bindings_of_every_adapter() {
    for shader in all() {
        let most = wgpu::Limits::default().max_storage_buffers_per_shader_stage as usize;
        assert!(shader.tensors.len() <= most.min(OFFSET_WORDS), "{}", shader.name);
    }
}

/// Workgroup memory and invocations of a module's entry point.
fn workgroup(module: &Module) -> (u32, u32) {
    let mut layouter = Layouter::default();
    layouter.update(module.to_ctx()).unwrap();
    let shared = module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
    let bytes = shared.map(|(_, v)| layouter[v.ty].size).sum();
    (bytes, module.entry_points[0].workgroup_size.iter().product())
}

#[test]
fn b257_shaders_fit_the_smallest_workgroups() {
    for shader in all() {
        for value in [1, 4] {
            for variant in types_under(shader, |name| if name == "EXPERTS" { 256 } else { value }) {
                let (bytes, invocations) = workgroup(&parse(&source(&variant)));
                assert!(bytes <= 16384, "{}: {bytes} bytes of workgroup memory", shader.name);
                assert!(invocations <= 256, "{}: {invocations} invocations", shader.name);
            }
        }
    }
}

/// The control: what is too large is measured as such.
#[test]
fn b257_workgroups_are_measured() {
    let source = "var<workgroup> x: array<vec4<u32>, 1025>;
        @compute @workgroup_size(8, 65) fn main() { x[0] = vec4<u32>(); }";
    assert_eq!(workgroup(&parse(source)), (16400, 520));
}

/// What browsers and drivers are given is WGSL without extensions, fits the default limits, and translates to SPIR-V, MSL
/// and HLSL.
#[test]
fn recorded_shaders_are_what_every_browser_takes() {
    for shader in all() {
        for variant in variants(shader) {
            let source = recorded_source(&variant);
            translates(shader.name, &source);
            assert!(!source.contains("immediate"), "{}", shader.name);
        }
    }
    translates("hash", crate::recording::HASH);
}

fn translates(name: &str, source: &str) {
    assert_eq!(mixed_operators(source), [""; 0], "{name}");
    let module = wgsl::parse_str(source).unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(source)));
    let info = Validator::new(ValidationFlags::all(), Capabilities::empty())
        .validate(&module)
        .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(source)));
    let limits = wgpu::Limits::default();
    let of = |space: fn(AddressSpace) -> bool| module.global_variables.iter().filter(|(_, v)| space(v.space)).count();
    let storage = of(|space| matches!(space, AddressSpace::Storage { .. }));
    assert!(storage <= limits.max_storage_buffers_per_shader_stage as usize, "{name}: {storage} storage buffers");
    assert_eq!(of(|space| space == AddressSpace::Uniform), 1, "{name}");
    let (bytes, invocations) = workgroup(&module);
    assert!(bytes <= limits.max_compute_workgroup_storage_size, "{name}: {bytes} bytes of workgroup memory");
    assert!(invocations <= limits.max_compute_invocations_per_workgroup, "{name}: {invocations} invocations");

    let pipeline = back::spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: "main".into() };
    let words = back::spv::write_vec(&module, &info, &back::spv::Options::default(), Some(&pipeline));
    assert!(words.is_ok_and(|words| words.len() > 5), "{name}: SPIR-V");
    let options = back::msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
    let text = back::msl::write_string(&module, &info, &options, &back::msl::PipelineOptions::default());
    assert!(text.unwrap_or_else(|e| panic!("{name}: MSL: {e}")).0.contains("kernel void"), "{name}");
    let mut text = String::new();
    let options = back::hlsl::Options { fake_missing_bindings: true, ..Default::default() };
    let pipeline = back::hlsl::PipelineOptions::default();
    let mut writer = back::hlsl::Writer::new(&mut text, &options, &pipeline);
    writer.write(&module, &info, None).unwrap_or_else(|e| panic!("{name}: HLSL: {e}"));
    assert!(text.contains("[numthreads("), "{name}");
}

/// Lines on which `&&` and `||` stand beside each other, which WGSL forbids and the parser here takes.
fn mixed_operators(source: &str) -> Vec<&str> {
    let mixes = |line: &&str| {
        // Of every depth of parentheses, which of the two was there.
        let mut seen = vec![[false; 2]];
        let code = line.split("//").next().unwrap_or_default();
        let mut pairs = code.as_bytes().windows(2);
        pairs.any(|pair| {
            match pair[0] {
                b'(' | b'[' | b'{' => seen.push([false; 2]),
                b')' | b']' | b'}' if seen.len() > 1 => drop(seen.pop()),
                b',' | b';' => seen.last_mut().unwrap().fill(false),
                _ => {}
            }
            let both = seen.last_mut().unwrap();
            both[0] |= pair == b"&&";
            both[1] |= pair == b"||";
            *both == [true; 2]
        })
    };
    source.lines().filter(mixes).collect()
}

/// The control: what is forbidden is found, and nothing else.
#[test]
fn mixed_operators_are_found() {
    for forbidden in ["let a = b || c && d;", "    f(x, (y), b && (c) || d);"] {
        assert_eq!(mixed_operators(forbidden), [forbidden]);
    }
    for allowed in ["let a = b || (c && d);", "f(a && b, c || d);", "let a = b & c || d; // && e", "if (a || b) && c {"]
    {
        assert_eq!(mixed_operators(allowed), [""; 0], "{allowed}");
    }
}
