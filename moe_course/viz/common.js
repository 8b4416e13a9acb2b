// What all pictures share. Put in front of each module, so that a picture is one ES module without imports.
// Everything that comes from a run (prompts, tokens, names) enters the page as text, never as markup.

const COLOURS = ["#1845fb", "#ff5e02", "#c91f16", "#c849a9", "#adad7d", "#86c8dd", "#578dff", "#656364"];
const MARKS = ["circle", "square", "triangle", "diamond"];
const rankColour = (rank) => COLOURS[rank % COLOURS.length];
const rankMark = (rank) => MARKS[Math.floor(rank / COLOURS.length) % MARKS.length];

// An element: h("button", {class: "play", onclick: f, "aria-label": "Play"}, "text", otherElement)
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A colour as #rrggbb: JupyterLab says "white".
function inDigits(colour) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = colour;
  return pen.fillStyle;
}

// The colours of the page around the picture. JupyterLab, our own pages and slides each say them in their way.
function theme(root) {
  const style = getComputedStyle(root);
  const read = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
  return {
    background: inDigits(read("--mc-background", "#ffffff")),
    text: read("--mc-text", "#1b1b1b"),
    muted: read("--mc-muted", "#5c5c5c"),
    line: read("--mc-line", "#c9c9c9"),
    panel: read("--mc-panel", "#f3f3f3"),
    lane: read("--mc-lane", "#f3f3f3"),
    accent: read("--mc-accent", "#1845fb"),
  };
}

// Calls `redraw` when the page changes between light and dark. Returns a function that stops it.
function onTheme(root, redraw) {
  const observer = new MutationObserver(redraw);
  const attributes = ["class", "style", "data-theme", "data-jp-theme-light", "data-jp-theme-name"];
  for (const element of [document.documentElement, document.body]) observer.observe(element, { attributes: true, attributeFilter: attributes });
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", redraw);
  return () => {
    observer.disconnect();
    media.removeEventListener("change", redraw);
  };
}

const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// JupyterLab's own keys rest while ours are in use. It asks the element that has the focus, and no other.
function ownKeys(root) {
  root.addEventListener("focusin", ({ target }) => target.setAttribute("data-lm-suppress-shortcuts", "true"));
}

// Tell a screen reader, once, and only when it is news.
function say(region, text) {
  if (region.textContent !== text) region.textContent = text;
}

// Data inside a line of our words: whatever way it runs, and whatever it says of that, the words around it stay.
// The number of a byte (`ö₁`) is none of the data: behind a letter that runs from right to left it would come first.
function isolated(text) {
  const [, data, part] = /^(.*?)([₁-₄]?)$/su.exec(text);
  const loose = data.replace(/[\u202a-\u202e\u2066-\u2069]/gu, (sign) => `\\u${sign.codePointAt(0).toString(16)}`);
  return `\u2068${loose}\u2069${part}`;
}

// The beginning of a text that is too long for its place, in whole characters.
function shortened(text, most = 24) {
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

// Calls `f` at most every `ms`, and always with the last value.
function throttled(f, ms = 100) {
  let timer = null;
  let latest;
  return (value) => {
    latest = value;
    if (timer !== null) return;
    timer = setTimeout(() => {
      timer = null;
      f(latest);
    }, ms);
  };
}

// Device pixels to a CSS pixel. A deck scales its slides.
const pixelRatio = () => Math.min((window.devicePixelRatio || 1) * (window.Reveal?.getScale?.() ?? 1), 2);

// A canvas that stays sharp: sized in CSS pixels, drawn in device pixels. Returns its 2D context, cleared.
function crisp(canvas, width, height) {
  const ratio = pixelRatio();
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const FONT = '13px ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const MONO = '12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';

// anywidget's protocol around `mount(root, data, opts)`.
function adapter(mount) {
  return {
    render({ model, el }) {
      let mine = false; // is the change of `state` our own, on its way out?
      const send = throttled((state) => {
        mine = true;
        model.set("state", state);
        model.save_changes();
        mine = false;
      });
      const picture = mount(el, model.get("data"), { ...model.get("opts"), state: model.get("state"), onState: send });
      const follow = () => {
        if (mine) return;
        const wanted = model.get("state");
        picture.set(wanted);
        const now = picture.get(); // what there is not was refused: the kernel hears what is shown
        if (Object.keys(now).some((name) => name in wanted && wanted[name] !== now[name])) send(now);
      };
      model.on("change:state", follow);
      return () => {
        model.off("change:state", follow);
        picture.destroy();
      };
    },
  };
}
