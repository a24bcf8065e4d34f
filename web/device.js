// A WebGPU device with the default limits, raised only where a recording needs larger buffers.

import { Refused } from "./recording.js";

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/// The limits that a report names.
const LIMITS = [
    "maxBufferSize",
    "maxStorageBufferBindingSize",
    "maxStorageBuffersPerShaderStage",
    "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupStorageSize",
    "maxComputeWorkgroupsPerDimension",
];

/// Opens a device for a recording.
export async function open(needs) {
    if (!navigator.gpu) {
        throw new Refused(
            isSecureContext
                ? "This browser has no WebGPU, or it is turned off."
                : "WebGPU needs a page that was loaded over HTTPS or from localhost.",
        );
    }
    const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
    if (!adapter) {
        throw new Refused("This browser has WebGPU, but no adapter for it.");
    }
    const wanted = { maxBufferSize: needs.buffer, maxStorageBufferBindingSize: needs.binding };
    const defaults = { maxBufferSize: 2 ** 28, maxStorageBufferBindingSize: 2 ** 27 };
    const requiredLimits = {};
    for (const [limit, bytes] of Object.entries(wanted)) {
        if (bytes > adapter.limits[limit]) {
            const offered = megabytes(adapter.limits[limit]);
            throw new Refused(`The recording is too large: it needs ${limit} of ${megabytes(bytes)}, and this adapter offers ${offered}.`);
        }
        if (bytes > defaults[limit]) {
            requiredLimits[limit] = bytes;
        }
    }
    const device = await adapter.requestDevice({ label: "dropless", requiredLimits });
    return { device, about: about(adapter) };
}

/// The adapter in words, and what it offers.
function about(adapter) {
    const { vendor, architecture, device, description, isFallbackAdapter } = adapter.info;
    const words = [description, vendor, architecture, device].filter(Boolean);
    const name = [...new Set(words)].join(", ") || "an adapter that does not say what it is";
    const limits = LIMITS.map((limit) => [limit, adapter.limits[limit]]);
    return { name: isFallbackAdapter ? `${name} (on the CPU)` : name, limits };
}
