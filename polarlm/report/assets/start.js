// Unpack the embedded library and data, then build the page.
"use strict";

let DATA = null;

async function unpack(id) {
  const text = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function trouble(sentence) {
  $("#trouble").textContent = sentence;
  $("#trouble").hidden = false;
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    return trouble("The charts need a browser of 2023 or later (DecompressionStream). The tables can be read as they are.");
  }
  DATA = JSON.parse(await unpack("payload"));
  document.head.append(element("script", { textContent: await unpack("plotly") }));
  if (DATA.runs.length > 40) state.each = false;
  restore();
  applyTheme();
  buildSidebar();
  buildToolbar();
  setHidden(state.hidden);
  syncToolbar();
  if (!DATA.diagnostics.some(Boolean)) {
    document.querySelectorAll(".probed").forEach((section) => section.remove());
    ["depth", "growth", "heat", "lag", "trajectory"].forEach((id) => delete FIGURES[id]);
    $("#unprobed").hidden = false;
  }
  buildRecords();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const id = entry.target.id;
      if (!entry.isIntersecting) { inView.delete(id); continue; }
      inView.add(id);
      if (stale.has(id)) render(id);
    }
  }, { rootMargin: "500px" });
  Object.keys(FIGURES).forEach((id) => { stale.add(id); observer.observe(document.getElementById(id)); });
  window.scrollTo(0, state.scroll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); redraw(); });
  // Paper is white, and a hidden plot has no size: draw everything for the printer, then go back.
  const printing = (yes) => { document.documentElement.classList.toggle("printing", yes); applyTheme(yes ? false : isDark()); };
  addEventListener("beforeprint", () => { printing(true); drawAll(); });
  addEventListener("afterprint", () => { printing(false); redraw(); });
  addEventListener("pagehide", remember);
  // Figures are laid out for wide or narrow screens: draw again when that changes (a phone was turned).
  for (const width of [620, 1000]) matchMedia(`(max-width: ${width}px)`).addEventListener("change", redraw);
  if (DATA.reload) live();
  const asked = new URLSearchParams(location.hash.slice(1));
  if (asked.get("print")) await printFigures(asked.get("print"), asked.get("format") || "svg", asked.get("titled") === "1");
  document.documentElement.dataset.ready = "yes";
}

// A page on disk cannot ask whether its file changed, so it loads itself again; the reader's choices are remembered.
function live() {
  const note = $("#live"), button = element("button", { type: "button" });
  const write = () => {
    button.textContent = state.paused ? "continue" : "pause";
    note.replaceChildren(`Live: written ${new Date(DATA.created).toLocaleTimeString()}, ${state.paused ? "paused" : `reloads every ${DATA.reload} s`} `, button);
  };
  button.onclick = () => { state.paused = !state.paused; remember(); write(); };
  write();
  note.hidden = false;
  setInterval(() => { if (!state.paused && !document.hidden) { remember(); location.reload(); } }, DATA.reload * 1000);
}

start().catch((error) => {
  trouble("The charts could not be drawn: " + error.message);
  console.error(error);
});
