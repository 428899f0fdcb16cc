byId("theme").addEventListener("click", theme);
for (const part of [summary, memory, curve, modules, cuts, graph]) part();
// For whoever wants to know how long it took: milliseconds from navigation to a page in use.
document.documentElement.dataset.ready = performance.now().toFixed(0);
