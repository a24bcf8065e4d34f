// The hash of docs/recording.md, "Hash", on the host: of few words, as the device hashes the others.

const PARTS = 16;
const PART = 256;
const SEEDS = [0x243f6a88, 0x85a308d3];

/// Words of a part of so many.
export function part(words) {
    return Math.max(Math.ceil(Math.ceil(words / PARTS) / PART) * PART, PART);
}

/// Parts of so many words.
export function parts(words) {
    return Math.ceil(words / part(words));
}

function mix(bits) {
    let x = bits;
    x = Math.imul(x ^ (x >>> 16), 0x7feb352d);
    x = Math.imul(x ^ (x >>> 15), 0x846ca68b);
    return x ^ (x >>> 16);
}

/// The two sums of words that are numbered from 0 on.
function sums(words) {
    return SEEDS.map((seed) => words.reduce((sum, word, i) => (sum + mix(word ^ (Math.imul(i, 0x9e3779b1) + seed))) | 0, 0));
}

/// One word for a recording: the hash of the hashes of its ops, from the sums of all their parts.
export function digest(counts, all) {
    const hashes = [];
    let at = 0;
    for (const count of counts) {
        let [a, b] = [0, 0];
        for (const end = at + count; at < end; at += 1) {
            a = (a + all[2 * at]) | 0;
            b = (b + all[2 * at + 1]) | 0;
        }
        hashes.push(a, b);
    }
    return sums(hashes).map((sum) => (sum >>> 0).toString(16).padStart(8, "0")).join("");
}
