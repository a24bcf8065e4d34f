// The page: a recording is chosen, run, and what came of it is shown.

import { open } from "./device.js";
import { digest } from "./hash.js";
import { Player } from "./player.js";
import { Refused, read } from "./recording.js";
import { difference, report } from "./report.js";
import { Sections, showLoad, showLoss } from "./results.js";

const element = (id) => document.getElementById(id);
const [status, progress, verdict] = ["status", "progress", "verdict"].map(element);

/// What the whole page is doing: idle, running, right, wrong or failed.
function enter(state) {
    document.documentElement.dataset.state = state;
    document.querySelectorAll("#choose button, #choose input").forEach((one) => (one.disabled = state === "running"));
    progress.hidden = state !== "running";
}

function judge(right, word, line) {
    const strong = document.createElement("strong");
    strong.textContent = word;
    verdict.replaceChildren(strong, line);
    verdict.className = right ? "right" : "wrong";
    verdict.hidden = false;
}

function advance(what, done, all) {
    progress.max = all;
    progress.value = done;
    progress.textContent = `${done} of ${all}`;
    progress.setAttribute("aria-valuetext", `${what}: ${done} of ${all}`);
}

/// Runs a recording, whose files `get` opens.
async function run(get) {
    enter("running");
    verdict.hidden = true;
    element("results").hidden = true;
    element("trained").hidden = true;
    progress.removeAttribute("value");
    let device;
    try {
        status.textContent = "Loading the recording.";
        const recording = await read(get);
        const { header, ops } = recording;
        status.textContent = `${header.title}: compiling ${header.pipelines} pipelines.`;
        const opened = await open(header.needs);
        device = opened.device;
        const player = new Player(device, recording);
        await player.compile((done, all) => advance("compiled", done, all));

        status.textContent = `${header.title}: running ${ops.length} operations on ${opened.about.name}.`;
        const sections = new Sections(element("sections"), recording);
        element("results").hidden = false;
        element("report").textContent = "";
        const began = performance.now();
        const { sums, read: words } = await player.run(ops.length, {
            progress: (done, all) => advance("done", done, all),
            compared: (at, same) => sections.compared(at, same),
        });
        const seconds = ((performance.now() - began) / 1000).toFixed(1);
        if (header.steps.length > 0) {
            showLoss(element("loss"), header, words, sections.first === undefined);
            showLoad(element("load"), header, words);
            element("trained").hidden = false;
        }
        const own = digest(ops.map((op) => op.parts), sums);
        const first = sections.first;
        let lines = [`digest ${own}, recorded ${header.digest}`];
        if (first === undefined) {
            const all = `every one of ${ops.length} operations wrote the recorded bits, in ${seconds} s`;
            lines = [`right: ${all}`, ...lines];
            judge(true, own, `The recorded digest: ${all}.`);
        } else {
            const { name, section } = ops[first];
            const what = `operation ${first} of ${ops.length}, ${name} (in: ${section}), wrote other bits`;
            judge(false, own, `Not the recorded digest, ${header.digest}: ${what}.`);
            status.textContent = "Running up to the first difference once more.";
            lines = ["wrong", ...lines, ...difference(ops[first], first, ops.length, await player.explain(first))];
        }
        status.textContent = `Done on ${opened.about.name}.`;
        element("report").textContent = report(header, opened.about, lines);
        enter(first === undefined ? "right" : "wrong");
    } catch (error) {
        const line = error instanceof Refused ? error.message : `This page failed: ${error.message ?? error}`;
        status.textContent = line.replace(/\s+/g, " ");
        enter("failed");
    } finally {
        device?.destroy();
    }
}

/// The files of a recording in this page's folder.
function fetched(folder) {
    return async (name) => {
        const response = await fetch(`${folder}/${name}`).catch(() => undefined);
        if (response?.ok) {
            return response;
        }
        const why = response ? `${response.status} ${response.statusText}`.trim() : "no answer";
        throw new Refused(`There is no ${folder}/${name} (${why}).`);
    };
}

/// The files of a recording that were chosen.
function chosen(files) {
    return async (name) => {
        const file = [...files].find((file) => file.name === name);
        if (file) {
            return file;
        }
        throw new Refused(`${name} is not among the chosen files.`);
    };
}

async function copy() {
    const text = element("report");
    try {
        await navigator.clipboard.writeText(text.textContent);
        element("copied").textContent = "Copied.";
    } catch {
        getSelection().selectAllChildren(text);
        element("copied").textContent = "The browser does not allow it; the report is selected.";
    }
}

for (const button of document.querySelectorAll("[data-recording]")) {
    button.addEventListener("click", () => run(fetched(button.dataset.recording)));
}
const linked = new URLSearchParams(location.search).get("recording");
if (linked) {
    element("linked").hidden = false;
    element("linked").addEventListener("click", () => run(fetched(linked)));
}
element("files").addEventListener("change", ({ target }) => target.files.length > 0 && run(chosen(target.files)));
element("copy").addEventListener("click", copy);
status.textContent = "Choose a recording.";
enter("idle");
