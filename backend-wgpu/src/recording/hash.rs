//! The hash of what an op wrote: docs/recording.md, "Hash". On the host, and as a shader of its own.
//!
//! Two sums of 32 bits over the words, each of which is mixed with its number first. Every single word that changes
//! changes both sums; nothing here withstands somebody who looks for two contents with the same hash.

use super::format::{Op, Program};

/// The shader, which is also part of every recording.
pub(crate) const SHADER: &str = include_str!("hash.wgsl");
/// Parts into which what an op wrote is divided, at most, so that a difference has a place.
pub(super) const PARTS: u64 = 16;
/// The least words of a part.
pub(super) const PART: u64 = 256;
/// What is added to a place, for either sum.
const SEEDS: [u32; 2] = [0x243F_6A88, 0x85A3_08D3];

/// Two sums.
pub(super) type Sums = [u32; 2];

/// How many words a part has of so many.
pub(super) fn part(words: u64) -> u64 {
    words.div_ceil(PARTS).next_multiple_of(PART).max(PART)
}

/// How many parts so many words have.
pub(super) fn parts(words: u64) -> u64 {
    words.div_ceil(part(words))
}

fn mix(bits: u32) -> u32 {
    let x = (bits ^ (bits >> 16)).wrapping_mul(0x7FEB_352D);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

/// The sums of two sets of words.
pub(super) fn add(a: Sums, b: Sums) -> Sums {
    [a[0].wrapping_add(b[0]), a[1].wrapping_add(b[1])]
}

/// The hash of words that are numbered from 0 on.
pub(super) fn of(words: impl IntoIterator<Item = u32>) -> Sums {
    (0u32..).zip(words).fold([0; 2], |sums, (i, word)| {
        let place = i.wrapping_mul(0x9E37_79B1);
        add(sums, SEEDS.map(|seed| mix(word ^ place.wrapping_add(seed))))
    })
}

/// One word for a whole recording: the hash of the hashes of its ops, in hex.
pub(super) fn digest(ops: &[Op], sums: &[Sums]) -> String {
    let mut rest = sums;
    let mut words = Vec::new();
    for op in ops {
        let (own, after) = rest.split_at(usize::try_from(parts(op.words())).unwrap_or(usize::MAX).min(rest.len()));
        rest = after;
        words.extend(own.iter().copied().fold([0; 2], add));
    }
    let [a, b] = of(words);
    format!("{a:08x}{b:08x}")
}

/// The shader on a device.
#[derive(Debug)]
pub(super) struct Hasher {
    device: wgpu::Device,
    pipeline: wgpu::ComputePipeline,
}

/// Words of a buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span<'a> {
    pub(super) buffer: &'a wgpu::Buffer,
    /// In words.
    pub(super) first: u64,
    pub(super) words: u64,
}

/// Where a binding may start, in words.
const ALIGNMENT: u64 = 64;

impl Hasher {
    pub(super) fn new(device: &wgpu::Device) -> Hasher {
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some("hash"),
            source: wgpu::ShaderSource::Wgsl(SHADER.into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("hash"),
            layout: None,
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        Hasher { device: device.clone(), pipeline }
    }

    /// Memory for the sums of so many parts, all of them 0.
    pub(super) fn sums(&self, parts: u64) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("sums"),
            size: (parts * size_of::<Sums>() as u64).max(16),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        })
    }

    /// Queues the sums of what an op wrote, to the part `first` of `sums` and those that follow.
    pub(super) fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        spans: &[Span<'_>],
        sums: &wgpu::Buffer,
        first: u64,
    ) {
        let total = spans.iter().map(|span| span.words).sum();
        let mut number = 0;
        for span in spans.iter().filter(|span| span.words > 0) {
            let start = span.first / ALIGNMENT * ALIGNMENT;
            let range = [span.first - start, span.words, number, part(total), first, 0, 0, 0];
            number += span.words;
            let range = range.map(|value| u32::try_from(value).expect("a buffer that can be bound has fewer words"));
            let uniform = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("range"),
                size: 32,
                usage: wgpu::BufferUsages::UNIFORM,
                mapped_at_creation: true,
            });
            uniform
                .slice(..)
                .get_mapped_range_mut()
                .expect("it was made mapped")
                .copy_from_slice(bytemuck::cast_slice(&range));
            uniform.unmap();
            let written = wgpu::BufferBinding {
                buffer: span.buffer,
                offset: start * 4,
                size: wgpu::BufferSize::new((span.first + span.words - start) * 4),
            };
            let entry = |binding, resource| wgpu::BindGroupEntry { binding, resource };
            let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("hash"),
                layout: &self.pipeline.get_bind_group_layout(0),
                entries: &[
                    entry(0, wgpu::BindingResource::Buffer(written)),
                    entry(1, sums.as_entire_binding()),
                    entry(2, uniform.as_entire_binding()),
                ],
            });
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&self.pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(u32::try_from(parts(total)).expect("few parts"), 1, 1);
        }
    }
}

/// Parts of all ops of a program.
pub(super) fn all_parts(program: &Program) -> u64 {
    program.ops.iter().map(|op| parts(op.words())).sum()
}
