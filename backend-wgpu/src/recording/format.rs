//! What a recording consists of: docs/recording.md. Everything here is what its files say.

use serde::{Deserialize, Serialize};

use super::hash;

/// What the files of every recording begin with.
pub(super) const FORMAT: &str = "dropless recording";
/// The version of the format that is written, and the only one that is read.
pub(super) const VERSION: u32 = 1;

/// The most bytes of a buffer: more than any device has.
const MOST_BYTES: u64 = 1 << 40;

/// `recording.json`: what there is to know before anything is run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Always the same.
    pub format: String,
    /// Of the format.
    pub version: u32,
    /// The program that wrote it, with its version.
    pub program: String,
    /// What was recorded, in a line.
    pub title: String,
    /// The device it was recorded on.
    pub device: String,
    /// One word for everything that the ops wrote.
    pub digest: String,
    /// The digest of weights and optimizer state, as a run prints it; None if nothing was trained.
    pub state: Option<String>,
    /// How many ops there are.
    pub ops: usize,
    /// How many pipelines.
    pub pipelines: usize,
    /// What a device must offer beyond nothing.
    pub needs: Needs,
    /// Uncompressed bytes of the other files.
    pub bytes: FileBytes,
    /// Consecutive ops that belong together.
    pub sections: Vec<Section>,
    /// What the training steps came to.
    pub steps: Vec<Step>,
}

/// What a device must offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Needs {
    /// Bytes of the largest buffer.
    pub buffer: u64,
    /// Bytes of the largest binding.
    pub binding: u64,
    /// Bytes of all buffers that are in use at once, at most.
    pub memory: u64,
}

/// Uncompressed bytes of the files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileBytes {
    /// `program.json.gz`.
    pub program: u64,
    /// `contents.bin.gz`.
    pub contents: u64,
    /// `sums.bin.gz`.
    pub sums: u64,
}

/// Consecutive ops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// What they do. Sections of one name belong together.
    pub name: String,
    /// How many there are.
    pub ops: usize,
}

/// What a training step came to, as words that were read back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Mean cross-entropy in nats per token.
    pub loss: Loss,
    /// The expert load of each MoE layer.
    pub load: Vec<Load>,
}

/// A loss: `scale` times the sum of `shards` f32 along the binary tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loss {
    /// The op that read the sums back. They come first in it.
    pub read: usize,
    /// How many sums there are.
    pub shards: usize,
    /// The bits of the scale.
    pub scale: u32,
    /// The bits of the loss.
    pub value: u32,
}

/// How often each expert of a layer was chosen: the sums of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// The op that read the counts back, a matrix with a column for each expert.
    pub read: usize,
    /// How many experts there are.
    pub experts: usize,
}

/// `program.json.gz`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// The WGSL text of the hash.
    pub hash: String,
    /// WGSL texts, each once.
    pub shaders: Vec<String>,
    /// Compiled shaders.
    pub pipelines: Vec<Pipeline>,
    /// Bytes of each buffer. A new one is zero.
    pub buffers: Vec<u64>,
    /// In the order of the queue.
    pub ops: Vec<Op>,
}

/// A compiled shader; its entry point is `main`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipeline {
    /// The shader's name.
    pub name: String,
    /// Its place among the texts.
    pub shader: usize,
    /// The bindings of group 0, in order. Group 1 has the parameters, a uniform buffer.
    pub bindings: Vec<Tensor>,
    /// Words of the parameters.
    pub given: usize,
}

/// A binding of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Its name in the shader.
    pub name: String,
    /// The type of its elements: `f32`, `bf16`, `e4m3`, `ue8m0`, `e2m1x2` or `u32`.
    #[serde(rename = "type")]
    pub element: String,
    /// Whether the shader writes it.
    pub writes: bool,
}

/// What a queue does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Op {
    /// Words that come from the host.
    Write {
        /// Where they go.
        to: Span,
        /// Their place in the contents, in words.
        contents: u64,
    },
    /// Words that go from one buffer to another.
    Copy {
        /// Where they come from.
        from: Span,
        /// Where they go: as many.
        to: Span,
    },
    /// Words that the host read back.
    Read {
        /// Where they lie.
        from: Span,
    },
    /// A dispatch.
    Run {
        /// The pipeline.
        pipeline: usize,
        /// Workgroups along x and y.
        groups: [u32; 2],
        /// What is bound; null where the shader is told that there is nothing.
        bind: Vec<Option<Bound>>,
        /// The words of the parameters.
        given: Vec<u32>,
        /// What it may write, in the order of the bindings.
        writes: Vec<Written>,
        /// Where in the contents the words are that it wrote; null if they were not kept.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kept: Option<u64>,
    },
}

/// Words of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// The buffer.
    pub buffer: usize,
    /// The first word.
    pub first: u64,
    /// How many there are.
    pub words: u64,
}

/// A binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bound {
    /// The buffer.
    pub buffer: usize,
    /// The first byte.
    pub offset: u64,
    /// How many bytes there are.
    pub size: u64,
}

/// What a dispatch may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Written {
    /// The binding.
    pub binding: usize,
    /// The whole words around the tensor's elements.
    pub span: Span,
}

impl Op {
    /// What it wrote, or read back.
    pub(super) fn spans(&self) -> Vec<Span> {
        match self {
            Op::Write { to, .. } | Op::Copy { to, .. } => vec![*to],
            Op::Read { from } => vec![*from],
            Op::Run { writes, .. } => writes.iter().map(|written| written.span).collect(),
        }
    }

    /// How many words that are.
    pub(super) fn words(&self) -> u64 {
        self.spans().iter().map(|span| span.words).sum()
    }

    /// Every buffer that it touches.
    pub(super) fn buffers(&self) -> Vec<usize> {
        match self {
            Op::Write { to, .. } => vec![to.buffer],
            Op::Copy { from, to } => vec![from.buffer, to.buffer],
            Op::Read { from } => vec![from.buffer],
            Op::Run { bind, .. } => bind.iter().flatten().map(|bound| bound.buffer).collect(),
        }
    }
}

/// A whole recording in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// `recording.json`.
    pub header: Header,
    /// `program.json.gz`.
    pub program: Program,
    /// `contents.bin.gz`: what the host wrote, and what was kept.
    pub contents: Vec<u32>,
    /// `sums.bin.gz`: the sums of every part of what every op wrote.
    pub sums: Vec<[u32; 2]>,
}

impl Recording {
    /// What an op is called.
    pub(super) fn name(&self, op: usize) -> &str {
        match &self.program.ops[op] {
            Op::Write { .. } => "write",
            Op::Copy { .. } => "copy_buffer",
            Op::Read { .. } => "read",
            Op::Run { pipeline, .. } => &self.program.pipelines[*pipeline].name,
        }
    }

    /// The section of an op.
    pub(super) fn section(&self, op: usize) -> &str {
        let mut end = 0;
        let found = self.header.sections.iter().find(|section| {
            end += section.ops;
            op < end
        });
        found.map_or("", |section| &section.name)
    }

    /// For each buffer the first and the last op that touches it.
    pub(super) fn lifetimes(program: &Program) -> Vec<Option<(usize, usize)>> {
        let mut lifetimes = vec![None; program.buffers.len()];
        for (at, op) in program.ops.iter().enumerate() {
            for buffer in op.buffers() {
                let (_, last) = lifetimes[buffer].get_or_insert((at, at));
                *last = at;
            }
        }
        lifetimes
    }

    /// What a device must offer for a program.
    pub(super) fn needs(program: &Program) -> Needs {
        let mut changes = vec![(0u64, 0u64); program.ops.len() + 1];
        for (size, lifetime) in program.buffers.iter().zip(Recording::lifetimes(program)) {
            if let Some((first, last)) = lifetime {
                changes[first].0 += size;
                changes[last + 1].1 += size;
            }
        }
        let (mut now, mut memory) = (0u64, 0u64);
        for (more, less) in changes {
            now = now + more - less;
            memory = memory.max(now);
        }
        let bindings = program.ops.iter().flat_map(|op| match op {
            Op::Run { bind, .. } => bind.iter().flatten().map(|bound| bound.size).collect(),
            _ => Vec::new(),
        });
        let sums = program.ops.iter().map(|op| hash::parts(op.words()) * 8).sum::<u64>();
        // What the hash binds is no more than that.
        let spans = program.ops.iter().flat_map(Op::spans).map(|span| (span.words + 63) * 4);
        Needs {
            buffer: program.buffers.iter().copied().max().unwrap_or(0).max(sums),
            binding: bindings.chain(spans).max().unwrap_or(0),
            memory,
        }
    }

    /// What does not fit together, if anything.
    pub(super) fn flaw(&self) -> Option<String> {
        let Recording { header, program, contents, sums } = self;
        let counted = |what: &str, says: u64, has: u64| {
            (says != has).then(|| format!("{what}: the header says {says}, and there are {has}"))
        };
        if let Some(flaw) = counted("ops", header.ops as u64, program.ops.len() as u64)
            .or_else(|| counted("pipelines", header.pipelines as u64, program.pipelines.len() as u64))
            .or_else(|| counted("ops of the sections", header.ops as u64, self.ops_of_sections()))
        {
            return Some(flaw);
        }
        if program.hash != hash::SHADER {
            return Some("its hash is another one".into());
        }
        if program.buffers.iter().any(|&bytes| bytes > MOST_BYTES) {
            return Some(format!("a buffer has more than {MOST_BYTES} bytes"));
        }
        for (at, pipeline) in program.pipelines.iter().enumerate() {
            if pipeline.shader >= program.shaders.len() || pipeline.bindings.len() > 8 || pipeline.given == 0 {
                return Some(format!("pipeline {at} is not one"));
            }
        }
        let mut parts = 0u64;
        for (at, op) in program.ops.iter().enumerate() {
            if !self.fits(op, contents.len() as u64) {
                return Some(format!("op {at} is not one"));
            }
            parts += hash::parts(op.words());
        }
        if let Some(flaw) = counted("sums", parts, sums.len() as u64) {
            return Some(flaw);
        }
        if Recording::needs(program) != header.needs {
            return Some("the header says that it needs something else".into());
        }
        let reads = header.steps.iter().flat_map(|step| {
            let load = step.load.iter().map(|load| (load.read, load.experts));
            load.chain([(step.loss.read, step.loss.shards)])
        });
        for (read, words) in reads {
            let fits =
                matches!(program.ops.get(read), Some(Op::Read { from }) if words > 0 && from.words >= words as u64);
            if !fits {
                return Some(format!("op {read} does not read what a step came to"));
            }
        }
        let digest = hash::digest(&program.ops, sums);
        (digest != header.digest).then(|| format!("the digest is {}, but that of the sums {digest}", header.digest))
    }

    fn ops_of_sections(&self) -> u64 {
        self.header.sections.iter().fold(0, |all: u64, section| all.saturating_add(section.ops as u64))
    }

    fn fits(&self, op: &Op, contents: u64) -> bool {
        let program = &self.program;
        let inside = |buffer: usize, first: u64, size: u64| {
            let end = first.checked_add(size);
            end.is_some_and(|end| program.buffers.get(buffer).is_some_and(|&bytes| end <= bytes)) && size > 0
        };
        let span = |span: &Span| {
            let bytes = span.first.checked_mul(4).zip(span.words.checked_mul(4));
            bytes.is_some_and(|(first, size)| inside(span.buffer, first, size))
        };
        let held = |at: u64, words: u64| at.checked_add(words).is_some_and(|end| end <= contents);
        match op {
            Op::Write { to, contents } => span(to) && held(*contents, to.words),
            Op::Copy { from, to } => span(from) && span(to) && from.words == to.words && from.buffer != to.buffer,
            Op::Read { from } => span(from),
            Op::Run { pipeline, groups, bind, given, writes, kept } => {
                let Some(pipeline) = program.pipelines.get(*pipeline) else { return false };
                let bound = |bound: &Bound| {
                    bound.offset.is_multiple_of(256)
                        && bound.size.is_multiple_of(4)
                        && inside(bound.buffer, bound.offset, bound.size)
                };
                groups.iter().all(|n| (1..=65535).contains(n))
                    && bind.len() == pipeline.bindings.len()
                    && bind.iter().flatten().all(bound)
                    && given.len() == pipeline.given
                    && writes.len() <= bind.len()
                    && writes
                        .iter()
                        .all(|w| span(&w.span) && pipeline.bindings.get(w.binding).is_some_and(|b| b.writes))
                    && kept.is_none_or(|at| held(at, op.words()))
            }
        }
    }
}
