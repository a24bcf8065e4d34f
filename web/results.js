// The results on the page: a table of what was compared, the loss, and the expert load.

/// The table of sections. Those of one name are one row.
export class Sections {
    constructor(table, { header, ops }) {
        this.ops = ops;
        this.rows = new Map();
        /// The first op that differs.
        this.first = undefined;
        const body = table.tBodies[0];
        body.replaceChildren();
        let at = 0;
        for (const { name, ops: count } of header.sections) {
            let row = this.rows.get(name);
            if (!row) {
                row = { ops: 0, words: 0, done: 0, wrong: new Map(), cells: [] };
                this.rows.set(name, row);
                const line = body.insertRow();
                const head = document.createElement("th");
                head.scope = "row";
                head.textContent = name;
                line.append(head);
                row.cells = [0, 1, 2].map(() => line.insertCell());
                row.cells.slice(0, 2).forEach((cell) => (cell.className = "number"));
            }
            row.ops += count;
            for (const end = at + count; at < end; at += 1) {
                row.words += ops[at].words;
            }
        }
        for (const row of this.rows.values()) {
            const [count, words] = row.cells;
            count.textContent = row.ops.toLocaleString("en");
            words.textContent = row.words.toLocaleString("en");
            this.show(row);
        }
    }

    compared(at, same) {
        const op = this.ops[at];
        const row = this.rows.get(op.section);
        row.done += 1;
        if (!same) {
            this.first ??= at;
            row.wrong.set(op.name, (row.wrong.get(op.name) ?? 0) + 1);
        }
        if (!same || row.done === row.ops) {
            this.show(row);
        }
    }

    show(row) {
        const cell = row.cells[2];
        if (row.wrong.size > 0) {
            cell.className = "wrong";
            cell.textContent = `✗ differs: ${[...row.wrong].map(([name, count]) => `${name} (${count})`).join(", ")}`;
        } else if (row.done === row.ops) {
            cell.className = "right";
            cell.textContent = "✓ the recorded bits";
        } else {
            cell.className = "";
            cell.textContent = "…";
        }
    }
}

const word = new DataView(new ArrayBuffer(4));

function float(bits) {
    word.setUint32(0, bits);
    return word.getFloat32(0);
}

/// The sum of f32 along the binary tree of NUMERICS.md.
function tree(terms) {
    if (terms.length === 1) {
        return terms[0];
    }
    const middle = Math.floor(terms.length / 2);
    return Math.fround(tree(terms.slice(0, middle)) + tree(terms.slice(middle)));
}

function entry(list, term, text) {
    const [dt, dd] = ["dt", "dd"].map((tag) => document.createElement(tag));
    dt.textContent = term;
    dd.textContent = text;
    list.append(dt, dd);
}

/// The loss of each step as computed here; and the digest of what was trained, where every op was `right`.
export function showLoss(list, header, read, right) {
    list.replaceChildren();
    header.steps.forEach(({ loss }, step) => {
        const sums = [...read.get(loss.read).subarray(0, loss.shards)].map(float);
        const value = Math.fround(tree(sums) * float(loss.scale));
        const same = value === float(loss.value) ? "as recorded" : `recorded ${float(loss.value).toFixed(4)}`;
        entry(list, `Loss in step ${step + 1}`, `${value.toFixed(4)} nats per token, ${same}`);
    });
    if (header.state && right) {
        entry(list, "Digest of weights and optimizer state, as the program prints it", header.state);
    }
}

/// How often each expert was chosen in the last step, layer by layer.
export function showLoad(place, header, read) {
    place.replaceChildren();
    const { load } = header.steps[header.steps.length - 1];
    load.forEach(({ read: at, experts }, layer) => {
        const counts = new Array(experts).fill(0);
        read.get(at).forEach((count, i) => (counts[i % experts] += count));
        const most = Math.max(...counts, 1);
        const figure = document.createElement("figure");
        const caption = document.createElement("figcaption");
        const mean = counts.reduce((a, b) => a + b, 0) / experts;
        caption.textContent = `Expert load of MoE layer ${layer + 1}: mean ${mean.toFixed(0)}, most ${most}`;
        const bars = document.createElement("div");
        bars.className = "bars";
        bars.setAttribute("role", "img");
        bars.setAttribute("aria-label", `Choices of experts 0 to ${experts - 1}: ${counts.join(", ")}`);
        for (const count of counts) {
            const bar = document.createElement("span");
            bar.style.height = `${(100 * count) / most}%`;
            bars.append(bar);
        }
        figure.append(caption, bars);
        place.append(figure);
    });
}
