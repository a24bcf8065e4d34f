// Runs a recording on a device. Every op is followed by a hash of what it wrote, whose sums are compared with those of the
// recording as soon as they are there.

import { part } from "./hash.js";
import { Refused } from "./recording.js";

/// Where a binding may start, in words and in bytes.
const ALIGNED_WORDS = 64;
const ALIGNED = 256;
/// A batch of ops should take about so many milliseconds, so that the page stays responsive.
const BATCH_MS = 100;
const MOST_OPS = 128;
/// Words of a difference that are shown.
const SHOWN = 8;

const { STORAGE, UNIFORM, COPY_SRC, COPY_DST, MAP_READ } = globalThis.GPUBufferUsage ?? {};

export class Player {
    constructor(device, recording) {
        this.device = device;
        this.recording = recording;
        this.failure = new Promise((_, reject) => {
            device.lost.then(({ message, reason }) => {
                reject(new Refused(`The device was lost: ${message || reason}`));
            });
            device.onuncapturederror = ({ error }) => reject(new Refused(`The device failed: ${error.message}`));
        });
        // Somebody waits for it only while something runs.
        this.failure.catch(() => {});
    }

    /// Compiles every pipeline; `progress` is told how many are done.
    async compile(progress) {
        const { device, recording } = this;
        const { shaders, pipelines, hash } = recording.program;
        const modules = shaders.map((code) => device.createShaderModule({ code }));
        const entry = (binding, type) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } });
        const given = device.createBindGroupLayout({ entries: [entry(0, "uniform")] });
        const compiled = async (code, name, layouts) => {
            const compute = { module: code, entryPoint: "main" };
            const layout = device.createPipelineLayout({ bindGroupLayouts: layouts });
            try {
                return await device.createComputePipelineAsync({ label: name, layout, compute });
            } catch (error) {
                throw new Refused(`The shader ${name} is refused: ${error.message}`);
            }
        };
        let done = 0;
        const one = async ({ name, shader, bindings }) => {
            const type = ({ writes }) => (writes ? "storage" : "read-only-storage");
            const tensors = device.createBindGroupLayout({ entries: bindings.map((b, at) => entry(at, type(b))) });
            const raw = await compiled(modules[shader], name, [tensors, given]);
            progress((done += 1), pipelines.length);
            return { raw, tensors, bindings };
        };
        const all = Promise.all(pipelines.map(one));
        this.pipelines = await Promise.race([all, this.failure]);
        this.given = given;
        this.hashed = device.createBindGroupLayout({
            entries: [entry(0, "read-only-storage"), entry(1, "storage"), entry(2, "uniform")],
        });
        this.hash = await compiled(device.createShaderModule({ code: hash }), "hash", [this.hashed]);
        this.prepare();
    }

    /// What no run changes: the parameters of every dispatch, one after the other, and what stands for absent tensors.
    prepare() {
        const { ops } = this.recording;
        const rows = [];
        const row = (words) => rows.push(words) - 1;
        for (const op of ops) {
            op.parameters = op.kind === "run" ? row(op.given) : undefined;
            let number = 0;
            op.ranges = op.spans.map((span) => {
                const start = Math.floor(span.first / ALIGNED_WORDS) * ALIGNED_WORDS;
                const range = [span.first - start, span.words, number, part(op.words), op.sums, 0, 0, 0];
                number += span.words;
                return { row: row(range), buffer: span.buffer, offset: start * 4, size: (span.first - start + span.words) * 4 };
            });
        }
        const words = new Uint32Array((rows.length * ALIGNED) / 4);
        rows.forEach((row, at) => words.set(row, (at * ALIGNED) / 4));
        this.parameters = this.buffer(words.byteLength, UNIFORM | COPY_DST);
        this.device.queue.writeBuffer(this.parameters, 0, words);
        this.nothing = [0, 1].map(() => this.buffer(8 * ALIGNED, STORAGE));
    }

    buffer(size, usage = STORAGE | COPY_SRC | COPY_DST) {
        return this.device.createBuffer({ size, usage });
    }

    /// Runs the first `count` ops. `progress` is told how many are done, `compared` of each whether its sums are those
    /// recorded, `look` gets the buffers after the last one. Returns all sums, and the words that were read back.
    async run(count, { progress = () => {}, compared = () => {}, look = async () => {} }) {
        const { device, recording } = this;
        const { ops } = recording;
        for (const filter of ["validation", "out-of-memory"]) {
            device.pushErrorScope(filter);
        }
        const buffers = [];
        this.sums = this.buffer(Math.max(recording.parts * 8, 16), STORAGE | COPY_SRC);
        const all = new Uint32Array(recording.parts * 2);
        const read = new Map();
        let size = 8;
        try {
            for (let at = 0; at < count; ) {
                const batch = ops.slice(at, Math.min(at + size, count));
                const began = performance.now();
                const words = await Promise.race([this.batch(batch, at, buffers, read), this.failure]);
                const first = batch[0].sums;
                all.set(words, first * 2);
                batch.forEach((op, i) => compared(at + i, this.sameSums(op, all)));
                at += batch.length;
                if (at < count) {
                    this.release(batch, at, buffers);
                }
                progress(at, count);
                const took = performance.now() - began;
                size = Math.max(1, Math.min(MOST_OPS, Math.round(size * Math.min(2, Math.max(0.5, BATCH_MS / took)))));
            }
            await look(buffers);
        } finally {
            [...buffers, this.sums].forEach((buffer) => buffer?.destroy());
        }
        const [memory, validation] = [await device.popErrorScope(), await device.popErrorScope()];
        if (memory) {
            throw new Refused("The recording is too large: the device is out of memory.");
        }
        if (validation) {
            throw new Refused(`The device refuses the recording: ${validation.message}`);
        }
        return { sums: all, read };
    }

    sameSums(op, sums) {
        const [from, to] = [op.sums * 2, (op.sums + op.parts) * 2];
        return this.recording.sums.subarray(from, to).every((sum, i) => sum === sums[from + i]);
    }

    /// Queues some ops and waits for their sums.
    async batch(ops, first, buffers, read) {
        const { device, recording } = this;
        const sizes = recording.program.buffers;
        let encoder = device.createCommandEncoder();
        let pass;
        const compute = () => (pass ??= encoder.beginComputePass());
        const end = () => {
            pass?.end();
            pass = undefined;
        };
        const staged = [];
        ops.forEach((op, i) => {
            op.buffers.forEach((buffer) => (buffers[buffer] ??= this.buffer(sizes[buffer])));
            if (op.kind === "write") {
                // What was queued before must not see it.
                end();
                device.queue.submit([encoder.finish()]);
                encoder = device.createCommandEncoder();
                const words = recording.contents.subarray(op.contents, op.contents + op.words);
                device.queue.writeBuffer(buffers[op.to.buffer], op.to.first * 4, words);
            } else if (op.kind === "copy") {
                end();
                const { from, to } = op;
                encoder.copyBufferToBuffer(buffers[from.buffer], from.first * 4, buffers[to.buffer], to.first * 4, to.words * 4);
            } else if (op.kind === "run") {
                this.dispatch(compute(), op, buffers);
            } else if (recording.reads.has(first + i)) {
                end();
                staged.push([first + i, this.stage(encoder, buffers[op.from.buffer], op.from)]);
            }
            this.hashes(compute(), op, buffers);
        });
        end();
        const last = ops[ops.length - 1];
        const parts = last.sums + last.parts - ops[0].sums;
        const sums = parts > 0 ? this.stage(encoder, this.sums, { first: ops[0].sums * 2, words: parts * 2 }) : undefined;
        device.queue.submit([encoder.finish()]);
        for (const [op, buffer] of staged) {
            read.set(op, await this.take(buffer));
        }
        return sums ? this.take(sums) : new Uint32Array();
    }

    /// Destroys the buffers of which nothing is needed from op `next` on.
    release(ops, next, buffers) {
        const { lifetimes } = this.recording;
        for (const buffer of new Set(ops.flatMap((op) => op.buffers))) {
            if (lifetimes[buffer].last < next) {
                buffers[buffer]?.destroy();
                buffers[buffer] = undefined;
            }
        }
    }

    dispatch(pass, op, buffers) {
        const { raw, tensors, bindings } = this.pipelines[op.pipeline];
        const entries = op.bind.map((bound, binding) => {
            const nothing = { buffer: this.nothing[Number(bindings[binding].writes)], offset: binding * ALIGNED, size: 16 };
            const resource = bound ? { buffer: buffers[bound.buffer], offset: bound.offset, size: bound.size } : nothing;
            return { binding, resource };
        });
        pass.setPipeline(raw);
        pass.setBindGroup(0, this.device.createBindGroup({ layout: tensors, entries }));
        const given = this.row(op.parameters, op.given.length * 4);
        pass.setBindGroup(1, this.device.createBindGroup({ layout: this.given, entries: [{ binding: 0, resource: given }] }));
        pass.dispatchWorkgroups(op.groups[0], op.groups[1]);
    }

    hashes(pass, op, buffers) {
        if (op.words === 0) {
            return;
        }
        pass.setPipeline(this.hash);
        for (const { row, buffer, offset, size } of op.ranges) {
            const resources = [{ buffer: buffers[buffer], offset, size }, { buffer: this.sums }, this.row(row, 32)];
            const entries = resources.map((resource, binding) => ({ binding, resource }));
            pass.setBindGroup(0, this.device.createBindGroup({ layout: this.hashed, entries }));
            pass.dispatchWorkgroups(op.parts);
        }
    }

    row(at, size) {
        return { buffer: this.parameters, offset: at * ALIGNED, size };
    }

    stage(encoder, from, { first, words }) {
        const buffer = this.buffer(words * 4, MAP_READ | COPY_DST);
        encoder.copyBufferToBuffer(from, first * 4, buffer, 0, words * 4);
        return buffer;
    }

    async take(buffer) {
        await buffer.mapAsync(GPUMapMode.READ);
        const words = new Uint32Array(buffer.getMappedRange().slice(0));
        buffer.destroy();
        return words;
    }

    /// Runs everything up to an op that differed once more, to see what it wrote.
    async explain(at) {
        const op = this.recording.ops[at];
        let found = new Uint32Array();
        const look = async (buffers) => {
            const encoder = this.device.createCommandEncoder();
            const staged = op.spans.map((span) => this.stage(encoder, buffers[span.buffer], span));
            this.device.queue.submit([encoder.finish()]);
            const taken = await Promise.all(staged.map((buffer) => this.take(buffer)));
            found = Uint32Array.from(taken.flatMap((words) => [...words]));
        };
        const { sums } = await this.run(at + 1, { look });
        const differs = (i) => [0, 1].some((j) => sums[2 * (op.sums + i) + j] !== this.recording.sums[2 * (op.sums + i) + j]);
        const where = Array.from({ length: op.parts }, (_, i) => i).find(differs);
        return where === undefined ? { again: false } : { again: true, ...this.place(op, where, found) };
    }

    /// The words of a part of what an op wrote that differ from those kept, or its first ones.
    place(op, where, found) {
        const { contents, program } = this.recording;
        const kept = op.kept ?? undefined;
        const [start, end] = [where * part(op.words), Math.min((where + 1) * part(op.words), op.words)];
        let words = [];
        for (let word = start; word < end && words.length < SHOWN; word += 1) {
            const expected = kept === undefined ? undefined : contents[kept + word];
            if (expected !== found[word]) {
                words.push({ word, found: found[word], expected });
            }
        }
        // The tensor in which the first of them lies, and its own numbers.
        const first = words[0]?.word ?? start;
        let [before, span] = [0, 0];
        while (first >= before + op.spans[span].words) {
            before += op.spans[span].words;
            span += 1;
        }
        const until = before + op.spans[span].words;
        const binding = op.kind === "run" ? program.pipelines[op.pipeline].bindings[op.writes[span].binding] : undefined;
        words = words.filter(({ word }) => word < until).map((one) => ({ ...one, word: one.word - before }));
        const range = [Math.max(start, before) - before, Math.min(end, until) - before - 1];
        return { tensor: binding?.name ?? "the words", element: binding?.type ?? "u32", range, words };
    }
}
