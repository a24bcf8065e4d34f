//! Compiled shaders.

use dropless_core::launch::{Binding, Variant};

use crate::shader::{OFFSET_WORDS, source};

/// A compiled variant.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) raw: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
}

impl Pipeline {
    /// A variant of one of the shaders of this crate; `patch` changes its text.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn compile(
        device: &wgpu::Device,
        variant: &Variant,
        patch: Option<fn(String) -> String>,
    ) -> Result<Pipeline, wgpu::Error> {
        let program = variant.program;
        let name = program.name;
        let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let entries: Vec<_> = (0..).zip(program.tensors).map(|(slot, binding)| entry(slot, *binding)).collect();
        let layout =
            device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(name), entries: &entries });
        let words = OFFSET_WORDS + program.scalars.len().next_multiple_of(4);
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: u32::try_from(words * 4).expect("a few words"),
        });
        let descriptor = |source: String| wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        };
        let module = match patch {
            // Nobody knows of a changed text that its loops end.
            Some(patch) => device.create_shader_module(descriptor(patch(source(variant)))),
            None => {
                // A counter in every loop would keep the drivers from unrolling them.
                let checks =
                    wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
                // SAFETY: the text is made from the files of `shaders/` and nothing else, and every loop there ends: its
                // counter moves towards a bound that the loop does not change, or what it counts by doubles, or is used up.
                // All other checks stay on.
                unsafe { device.create_shader_module_trusted(descriptor(source(variant)), checks) }
            }
        };
        let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        pollster::block_on(scope.pop()).map_or(Ok(Pipeline { raw, layout }), Err)
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
