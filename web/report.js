// What came of a run, as text that can be copied.

const numbers = new DataView(new ArrayBuffer(4));

/// A word in hex and as the numbers in it.
function shown(word, element) {
    numbers.setUint32(0, word);
    const hex = word.toString(16).padStart(8, "0");
    const bf16 = (bits) => {
        numbers.setUint32(0, (bits << 16) >>> 0);
        return numbers.getFloat32(0);
    };
    switch (element) {
        case "f32":
            return `${hex} (${numbers.getFloat32(0)})`;
        case "bf16":
            return `${hex} (${bf16(word & 0xffff)}, ${bf16(word >>> 16)})`;
        case "u32":
            return `${hex} (${word})`;
        default:
            return hex;
    }
}

/// Where the first op differs, line by line.
export function difference(op, at, count, found) {
    const lines = [`first difference: op ${at} of ${count}, ${op.name} (in: ${op.section})`];
    if (!found.again) {
        return [...lines, "  but not when everything was run once more: the device does not repeat itself"];
    }
    const { tensor, element, range, words } = found;
    lines.push(`  among the words ${range[0]} to ${range[1]} of ${tensor} (${element})`);
    for (const { word, found, expected } of words) {
        const wanted = expected === undefined ? "" : `, not ${shown(expected, element)}`;
        lines.push(`    word ${word}: ${shown(found, element)}${wanted}`);
    }
    return lines;
}

/// The whole report.
export function report(header, about, lines) {
    const limits = about.limits.map(([limit, value]) => `  ${limit} ${value}`);
    return [
        `recording: ${header.title}`,
        `recorded by ${header.program} on ${header.device}`,
        ...lines,
        `adapter: ${about.name}`,
        `browser: ${navigator.userAgent}`,
        "limits of the adapter:",
        ...limits,
    ].join("\n");
}
