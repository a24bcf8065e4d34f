//! Runs a recording: what its ops write is hashed on the device and compared.

use std::fmt;
use std::ops::Range;

use dropless_core::{Error, Result};

use super::format::{Bound, Needs, Op, Pipeline, Recording, Span};
use super::hash::{self, Hasher, Sums};
use super::recorder::download;
use crate::{BACKEND, adapter};

/// Ops that are handed over at once.
const BATCH: usize = 64;
/// Elements of a difference that are shown.
const SHOWN: usize = 8;
const OP: &str = "replay";

/// What came of a recording on an adapter.
#[derive(Clone, Debug)]
pub struct Replay {
    /// The adapter in words.
    pub device: String,
    /// One word for everything that the ops wrote here.
    pub digest: String,
    /// The first op that wrote something else than was recorded.
    pub difference: Option<Difference>,
}

/// An op that wrote something else.
#[derive(Clone, Debug)]
pub struct Difference {
    /// Its place.
    pub op: usize,
    /// How many ops there are.
    pub ops: usize,
    /// Its name.
    pub name: String,
    /// Its section.
    pub section: String,
    /// Whether it came again when everything was run once more.
    pub again: bool,
    /// Where; None if it did not come again.
    pub place: Option<Place>,
}

/// Where the words are that differ.
#[derive(Clone, Debug)]
pub struct Place {
    /// What was written, as the shader calls it.
    pub tensor: String,
    /// The type of its elements.
    pub element: String,
    /// The words of it among which the first one is.
    pub words: Range<u64>,
    /// The first of those that differ or, where only hashes were recorded, the first words there.
    pub elements: Vec<Element>,
}

/// A word that an op wrote.
#[derive(Clone, Copy, Debug)]
pub struct Element {
    /// Its place in the tensor.
    pub word: u64,
    /// What was written here.
    pub found: u32,
    /// What was recorded, if it was.
    pub expected: Option<u32>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { op, ops, name, section, again, place } = self;
        write!(f, "op {op} of {ops}, {name}, differs (in: {section})")?;
        if !again {
            write!(f, "\n  but not when everything was run once more: the device does not repeat itself")?;
        }
        let Some(Place { tensor, element, words, elements }) = place else { return Ok(()) };
        write!(f, "\n  among the words {} to {} of {tensor} ({element})", words.start, words.end - 1)?;
        for Element { word, found, expected } in elements {
            match expected {
                Some(expected) => write!(f, "\n    word {word}: {found:08x}, not {expected:08x}")?,
                None => write!(f, "\n    word {word}: {found:08x}")?,
            }
        }
        Ok(())
    }
}

/// Takes the buffers that are left.
type Look<'l> = &'l mut dyn FnMut(&[Option<wgpu::Buffer>]) -> Result<()>;

/// A device with a recording's pipelines.
struct Player<'a> {
    recording: &'a Recording,
    device: wgpu::Device,
    queue: wgpu::Queue,
    hasher: Hasher,
    pipelines: Vec<wgpu::ComputePipeline>,
    /// Stand where a shader could write a tensor, or read one, and there is none.
    nothing: [wgpu::Buffer; 2],
}

impl Recording {
    /// Runs the recording on an adapter (by index or a part of its name; else by `DROPLESS_ADAPTER`, or the best one).
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no such adapter, or it offers less than the recording needs;
    /// [`Error::Device`] when the device fails, or refuses what was recorded.
    pub fn replay(&self, adapter: Option<&str>) -> Result<Replay> {
        let adapter = adapter::choose(adapter)?;
        let player = Player::new(self, &adapter)?;
        let sums = player.run(self.program.ops.len(), None)?;
        let info = adapter.get_info();
        let device = format!("{} ({:?}, {} {})", info.name, info.backend, info.driver, info.driver_info);
        let digest = hash::digest(&self.program.ops, &sums);
        let difference = self.first(&sums).map(|op| player.explain(op)).transpose()?;
        Ok(Replay { device, digest, difference })
    }

    /// The first op whose sums are not those recorded.
    fn first(&self, sums: &[Sums]) -> Option<usize> {
        let at = sums.iter().zip(&self.sums).position(|(found, expected)| found != expected)?;
        (0..self.program.ops.len()).find(|&op| self.parts(op).contains(&at))
    }

    /// The parts of an op among those of all.
    fn parts(&self, op: usize) -> Range<usize> {
        let count = |ops: &[Op]| ops.iter().map(|op| hash::parts(op.words())).sum::<u64>();
        let before = count(&self.program.ops[..op]);
        let range = before..before + count(&self.program.ops[op..=op]);
        usize::try_from(range.start).expect("in memory")..usize::try_from(range.end).expect("in memory")
    }
}

impl<'a> Player<'a> {
    fn new(recording: &'a Recording, adapter: &wgpu::Adapter) -> Result<Player<'a>> {
        let Needs { buffer, binding, .. } = recording.header.needs;
        let (defaults, offered, name) = (wgpu::Limits::default(), adapter.limits(), adapter.get_info().name);
        let lacks = |what: &str, needs: u64, offers: u64| {
            let why = format!("{name}: the recording needs {what} of {needs} bytes, and the adapter offers {offers}");
            if needs > offers { Err(Error::Unavailable { backend: BACKEND, why }) } else { Ok(()) }
        };
        lacks("a buffer", buffer, offered.max_buffer_size)?;
        lacks("a binding", binding, offered.max_storage_buffer_binding_size)?;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("dropless replay"),
            required_limits: wgpu::Limits {
                max_buffer_size: buffer.max(defaults.max_buffer_size),
                max_storage_buffer_binding_size: binding.max(defaults.max_storage_buffer_binding_size),
                ..defaults
            },
            ..Default::default()
        };
        let unavailable =
            |e: wgpu::RequestDeviceError| Error::Unavailable { backend: BACKEND, why: format!("{name}: {e}") };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).map_err(unavailable)?;
        let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let program = &recording.program;
        let modules: Vec<_> = program.shaders.iter().map(|text| module(&device, text)).collect();
        let pipelines = program.pipelines.iter().map(|p| compile(&device, &modules[p.shader], p)).collect();
        let hasher = Hasher::new(&device);
        let nothing = [(); 2].map(|()| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("nothing"),
                size: 8 * 256,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        });
        let player = Player { recording, device, queue, hasher, pipelines, nothing };
        refused(pollster::block_on(scope.pop())).map(|()| player)
    }

    /// Runs the first `ops`; returns the sums of what they wrote. `look` takes what is left after the last of them.
    fn run(&self, ops: usize, look: Option<Look<'_>>) -> Result<Vec<Sums>> {
        let program = &self.recording.program;
        let lifetimes = Recording::lifetimes(program);
        let scopes = [wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation]
            .map(|filter| self.device.push_error_scope(filter));
        let sums = self.hasher.sums(hash::all_parts(program));
        let mut buffers: Vec<Option<wgpu::Buffer>> = vec![None; program.buffers.len()];
        let mut parts = 0;
        let mut encoder = self.encoder();
        for (at, op) in program.ops[..ops].iter().enumerate() {
            for buffer in op.buffers() {
                buffers[buffer].get_or_insert_with(|| self.buffer(program.buffers[buffer]));
            }
            if let Op::Write { to, contents } = op {
                // What was queued before must not see it.
                self.queue.submit([std::mem::replace(&mut encoder, self.encoder()).finish()]);
                let from = usize::try_from(*contents).expect("in memory");
                let words = &self.recording.contents[from..from + usize::try_from(to.words).expect("in memory")];
                self.queue.write_buffer(raw(&buffers, to.buffer), to.first * 4, bytemuck::cast_slice(words));
            }
            self.encode(&mut encoder, op, &buffers);
            let spans: Vec<_> = op
                .spans()
                .iter()
                .map(|span| hash::Span { buffer: raw(&buffers, span.buffer), first: span.first, words: span.words })
                .collect();
            self.hasher.encode(&mut encoder, &spans, &sums, parts);
            parts += hash::parts(op.words());
            if at % BATCH == BATCH - 1 {
                self.queue.submit([std::mem::replace(&mut encoder, self.encoder()).finish()]);
            }
            if at + 1 < ops {
                let done = op.buffers().into_iter().filter(|&b| lifetimes[b].is_some_and(|(_, last)| last == at));
                done.for_each(|buffer| buffers[buffer] = None);
            }
        }
        self.queue.submit([encoder.finish()]);
        let [memory, valid] = scopes;
        refused(pollster::block_on(valid.pop()))?;
        refused(pollster::block_on(memory.pop()))?;
        if let Some(look) = look {
            look(&buffers)?;
        }
        let words = download(&self.device, &self.queue, &sums, parts * 8)?;
        Ok(words.as_chunks::<2>().0.to_vec())
    }

    fn encode(&self, encoder: &mut wgpu::CommandEncoder, op: &Op, buffers: &[Option<wgpu::Buffer>]) {
        match op {
            Op::Write { .. } | Op::Read { .. } => {}
            Op::Copy { from, to } => encoder.copy_buffer_to_buffer(
                raw(buffers, from.buffer),
                from.first * 4,
                raw(buffers, to.buffer),
                to.first * 4,
                Some(to.words * 4),
            ),
            Op::Run { pipeline, groups, bind, given, .. } => {
                let bindings = &self.recording.program.pipelines[*pipeline].bindings;
                let pipeline = &self.pipelines[*pipeline];
                let entries: Vec<_> = (0u32..)
                    .zip(bind.iter().zip(bindings))
                    .map(|(slot, (bound, declared))| {
                        let (buffer, offset, size) = match bound {
                            Some(Bound { buffer, offset, size }) => (raw(buffers, *buffer), *offset, *size),
                            None => (&self.nothing[usize::from(!declared.writes)], u64::from(slot) * 256, 16),
                        };
                        let size = wgpu::BufferSize::new(size);
                        let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size });
                        wgpu::BindGroupEntry { binding: slot, resource }
                    })
                    .collect();
                let group = |at, entries: &[wgpu::BindGroupEntry<'_>]| {
                    self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                        label: None,
                        layout: &pipeline.get_bind_group_layout(at),
                        entries,
                    })
                };
                let parameters = self.device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some("parameters"),
                    size: given.len() as u64 * 4,
                    usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                });
                self.queue.write_buffer(&parameters, 0, bytemuck::cast_slice(given));
                let given = wgpu::BindGroupEntry { binding: 0, resource: parameters.as_entire_binding() };
                let groups_bound = [group(0, &entries), group(1, &[given])];
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                pass.set_pipeline(pipeline);
                for (at, bound) in (0..).zip(&groups_bound) {
                    pass.set_bind_group(at, bound, &[]);
                }
                pass.dispatch_workgroups(groups[0], groups[1], 1);
            }
        }
    }

    /// Runs everything up to an op that differed once more, and looks at what it wrote.
    fn explain(&self, op: usize) -> Result<Difference> {
        let recording = self.recording;
        let own = &recording.program.ops[op];
        let mut found = Vec::new();
        let mut look = |buffers: &[Option<wgpu::Buffer>]| {
            for span in own.spans() {
                found.extend(self.read(raw(buffers, span.buffer), span)?);
            }
            Ok(())
        };
        let sums = self.run(op + 1, Some(&mut look))?;
        let parts = recording.parts(op);
        let part = parts.clone().find(|&part| sums[part] != recording.sums[part]);
        let place = part.map(|part| place(recording, op, (part - parts.start) as u64, &found));
        let (name, section) = (recording.name(op).to_owned(), recording.section(op).to_owned());
        Ok(Difference { op, ops: recording.program.ops.len(), name, section, again: part.is_some(), place })
    }

    fn read(&self, buffer: &wgpu::Buffer, span: Span) -> Result<Vec<u32>> {
        let copy = self.buffer(span.words * 4);
        let mut encoder = self.encoder();
        encoder.copy_buffer_to_buffer(buffer, span.first * 4, &copy, 0, Some(span.words * 4));
        self.queue.submit([encoder.finish()]);
        download(&self.device, &self.queue, &copy, span.words * 4)
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    fn buffer(&self, size: u64) -> wgpu::Buffer {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        self.device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    }
}

/// The words of a part of what an op wrote that differ from those kept, or its first ones.
fn place(recording: &Recording, op: usize, part: u64, found: &[u32]) -> Place {
    let own = &recording.program.ops[op];
    let words = own.words();
    let (start, end) = (part * hash::part(words), ((part + 1) * hash::part(words)).min(words));
    let kept = match own {
        Op::Run { kept, .. } => *kept,
        _ => None,
    };
    let at = |i: u64| usize::try_from(i).expect("in memory");
    let element = |word: u64| Element {
        word,
        found: found[at(word)],
        expected: kept.map(|kept| recording.contents[at(kept + word)]),
    };
    let differing = |element: &Element| element.expected.is_none_or(|expected| expected != element.found);
    let mut elements: Vec<Element> = (start..end).map(element).filter(differing).take(SHOWN).collect();
    // The tensor in which the first of them lies, and its own numbers.
    let first = elements.first().map_or(start, |element| element.word);
    let (mut before, mut tensor, mut ty, mut until) = (0, own_name(own).to_owned(), "words".to_owned(), words);
    if let Op::Run { pipeline, writes, .. } = own {
        for written in writes {
            if first < before + written.span.words {
                let binding = &recording.program.pipelines[*pipeline].bindings[written.binding];
                (tensor, ty) = (binding.name.clone(), binding.element.clone());
                until = before + written.span.words;
                break;
            }
            before += written.span.words;
        }
    }
    elements.retain(|element| element.word < until);
    elements.iter_mut().for_each(|element| element.word -= before);
    Place { tensor, element: ty, words: start.max(before) - before..end.min(until) - before, elements }
}

/// What an op that is no dispatch works on.
fn own_name(op: &Op) -> &'static str {
    match op {
        Op::Write { .. } => "what the host wrote",
        Op::Copy { .. } => "the copy",
        Op::Read { .. } | Op::Run { .. } => "what was read",
    }
}

fn raw(buffers: &[Option<wgpu::Buffer>], at: usize) -> &wgpu::Buffer {
    buffers[at].as_ref().expect("a buffer is made before it is used")
}

fn refused(error: Option<wgpu::Error>) -> Result<()> {
    let what = |error: wgpu::Error| error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    error.map_or(Ok(()), |error| Err(Error::Device { backend: BACKEND, op: OP, what: what(error) }))
}

fn module(device: &wgpu::Device, text: &str) -> wgpu::ShaderModule {
    let source = wgpu::ShaderSource::Wgsl(text.into());
    device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source })
}

fn compile(device: &wgpu::Device, module: &wgpu::ShaderModule, pipeline: &Pipeline) -> wgpu::ComputePipeline {
    let entry = |binding, ty| wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
        count: None,
    };
    let storage = |read_only| wgpu::BufferBindingType::Storage { read_only };
    let tensors: Vec<_> = (0u32..).zip(&pipeline.bindings).map(|(at, b)| entry(at, storage(!b.writes))).collect();
    let layout = |entries: &[wgpu::BindGroupLayoutEntry]| {
        device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries })
    };
    let (tensors, given) = (layout(&tensors), layout(&[entry(0, wgpu::BufferBindingType::Uniform)]));
    let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(&pipeline.name),
        bind_group_layouts: &[Some(&tensors), Some(&given)],
        immediate_size: 0,
    });
    device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(&pipeline.name),
        layout: Some(&layout),
        module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    })
}
