// A recording: docs/recording.md. Whoever has one from here knows that its parts fit together.

import { digest, parts } from "./hash.js";

const FORMAT = "dropless recording";
const VERSION = 1;
const MOST_BYTES = 2 ** 32;

/// A line for the reader.
export class Refused extends Error {}

const damaged = (what) => new Refused(`The recording is damaged: ${what}.`);

/// Reads a recording; `open` gives the response or file of a name.
export async function read(open) {
    const text = await (await open("recording.json")).text();
    let header;
    try {
        header = JSON.parse(text);
    } catch {
        throw damaged("recording.json is not JSON");
    }
    if (header?.format !== FORMAT) {
        throw new Refused("This is not a recording of Dropless.");
    }
    if (header.version !== VERSION) {
        throw new Refused(`The recording is of version ${header.version}, and this page reads version ${VERSION}.`);
    }
    const bytes = async (name, size) => {
        if (!Number.isInteger(size) || size < 0 || size > MOST_BYTES) {
            throw damaged(`recording.json does not say how large ${name} is`);
        }
        return decompress(name, stream(await open(name)), size);
    };
    const program = JSON.parse(new TextDecoder().decode(await bytes("program.json.gz", header.bytes?.program)));
    const contents = words("contents.bin.gz", await bytes("contents.bin.gz", header.bytes.contents));
    const sums = words("sums.bin.gz", await bytes("sums.bin.gz", header.bytes.sums));
    const recording = { header, program, contents, sums };
    let flaw;
    try {
        flaw = complete(recording);
    } catch {
        flaw = "a part of it is missing";
    }
    if (flaw) {
        throw damaged(flaw);
    }
    return recording;
}

async function decompress(name, stream, size) {
    let bytes;
    try {
        bytes = new Uint8Array(await new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
    } catch {
        throw damaged(`${name} cannot be decompressed`);
    }
    if (bytes.length !== size) {
        throw damaged(`${name} has ${bytes.length} bytes, expected ${size}`);
    }
    return bytes;
}

/// Words from their bytes, which lie with those of one weight together.
function words(name, bytes) {
    const count = bytes.length / 4;
    if (!Number.isInteger(count)) {
        throw damaged(`${name} ends within a word`);
    }
    const all = new Uint32Array(count);
    for (let i = 0; i < count; i += 1) {
        all[i] = bytes[i] | (bytes[count + i] << 8) | (bytes[2 * count + i] << 16) | (bytes[3 * count + i] << 24);
    }
    return all;
}

const KINDS = ["write", "copy", "read", "run"];

/// What an op wrote, or read back, as spans of words; and what else the page asks of it. Kept beside what the file says.
function describe(op) {
    const kind = KINDS.find((kind) => kind in op);
    const { from, to, bind, writes } = op[kind];
    const spans = { write: [to], copy: [to], read: [from], run: writes?.map((written) => written.span) }[kind];
    const buffers = {
        write: [to?.buffer],
        copy: [from?.buffer, to?.buffer],
        read: [from?.buffer],
        run: bind?.filter(Boolean).map((bound) => bound.buffer),
    }[kind];
    const total = spans.reduce((sum, span) => sum + span.words, 0);
    return { kind, ...op[kind], spans, buffers, words: total, parts: parts(total) };
}

/// Completes a recording for the player. Returns what does not fit together, if anything.
function complete(recording) {
    const { header, program, contents, sums } = recording;
    const { shaders, pipelines, buffers } = program;
    recording.ops = program.ops.map(describe);
    const { ops } = recording;
    const whole = (...numbers) => numbers.every((n) => Number.isInteger(n) && n >= 0);
    const inside = (buffer, first, size) => whole(buffer, first, size) && size > 0 && first + size <= buffers[buffer];
    const span = ({ buffer, first, words }) => inside(buffer, first * 4, words * 4);
    const held = (at, count) => whole(at) && at + count <= contents.length;
    const fits = {
        write: (op) => span(op.to) && held(op.contents, op.words),
        copy: (op) => span(op.from) && span(op.to) && op.from.words === op.to.words && op.from.buffer !== op.to.buffer,
        read: (op) => span(op.from),
        run: (op) => {
            const pipeline = pipelines[op.pipeline];
            const bound = (bound) =>
                bound === null ||
                (inside(bound.buffer, bound.offset, bound.size) && bound.offset % 256 === 0 && bound.size % 4 === 0);
            return (
                op.groups.length === 2 &&
                op.groups.every((n) => whole(n) && n > 0 && n <= 65535) &&
                op.bind.length === pipeline.bindings.length &&
                op.bind.every(bound) &&
                op.given.length === pipeline.given &&
                op.writes.every((written) => span(written.span) && pipeline.bindings[written.binding].writes) &&
                (op.kept === undefined || op.kept === null || held(op.kept, op.words))
            );
        },
    };
    const pipeline = (one) => typeof shaders[one.shader] === "string" && one.bindings.length <= 8 && one.given > 0;
    let at = pipelines.findIndex((one) => !pipeline(one));
    if (at >= 0) {
        return `pipeline ${at} is not one`;
    }
    at = ops.findIndex((op) => !fits[op.kind](op));
    if (at >= 0) {
        return `op ${at} is not one`;
    }
    // Where the sums of each op begin, in parts.
    let count = 0;
    for (const op of ops) {
        op.sums = count;
        count += op.parts;
    }
    recording.parts = count;
    if (sums.length !== count * 2 || ops.length !== header.ops || pipelines.length !== header.pipelines) {
        return "its files do not belong together";
    }
    // The first and the last op that touch each buffer.
    recording.lifetimes = buffers.map(() => null);
    ops.forEach((op, at) => {
        for (const buffer of op.buffers) {
            recording.lifetimes[buffer] ??= { first: at, last: at };
            recording.lifetimes[buffer].last = at;
        }
    });
    at = 0;
    for (const section of header.sections) {
        for (const end = at + section.ops; at < end; at += 1) {
            ops[at].section = section.name;
            ops[at].name = { write: "write", copy: "copy_buffer", read: "read", run: pipelines[ops[at].pipeline]?.name }[ops[at].kind];
        }
    }
    if (at !== ops.length) {
        return "its sections do not cover its ops";
    }
    const reads = header.steps.flatMap((step) => [
        [step.loss.read, step.loss.shards],
        ...step.load.map((layer) => [layer.read, layer.experts]),
    ]);
    if (!reads.every(([read, count]) => ops[read].kind === "read" && count > 0 && ops[read].words >= count)) {
        return "a step's results are not read back";
    }
    recording.reads = new Set(reads.map(([read]) => read));
    const own = digest(ops.map((op) => op.parts), sums);
    return own === header.digest ? undefined : `its digest is ${header.digest}, but that of its sums ${own}`;
}

/// The bytes of a response or of a file.
function stream(source) {
    return source instanceof Blob ? source.stream() : source.body;
}
