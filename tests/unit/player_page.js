// As much of a page as the player's drawing and words need, for node: elements, and canvases that remember each call.

class Drawn {
  constructor() {
    this.calls = [];
    const looks = ["fillStyle", "strokeStyle", "globalAlpha", "font", "textAlign", "lineWidth"];
    const call = (name) => (...args) => this.calls.push({ name, args, ...Object.fromEntries(looks.map((look) => [look, this[look]])) });
    return new Proxy(this, { get: (own, name) => (name in own || typeof name === "symbol" ? own[name] : call(name)) });
  }
}

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, style: {} });
  }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  getContext() { return (this.context ??= Object.assign(new Drawn(), { globalAlpha: 1 })); }
  get textContent() { return this.children.map((child) => child.textContent ?? child).join(""); }
  set textContent(text) { this.children = [text]; }
  all(tag) { return this.children.flatMap((child) => (child.all ? [...(child.tag === tag ? [child] : []), ...child.all(tag)] : [])); }
}

globalThis.window = {};
globalThis.document = { createElement: (tag) => new Element(tag) };
globalThis.Path2D = class {
  steps = [];
  moveTo(...to) { this.steps.push(to); }
  lineTo(...to) { this.steps.push(to); }
  bezierCurveTo(...to) { this.steps.push(to.slice(-2)); }
};

const COLOURS_OF_PAGE = { background: "#ffffff", text: "#101010", muted: "#505050", line: "#c0c0c0", panel: "#f0f0f0", lane: "#eeeeee", accent: "#0000ff" };
const ALL = { step: 0, layer: 1, token: null, rank: null, expert: null };

// What the player keeps of a choice, as `build` in token_flow.js makes it.
function sceneFor(data, choice = {}, width = 1084) {
  const state = { ...ALL, ...choice };
  const model = readPass(data, data.passes[0]);
  const chosen = state.token === null ? [] : sameToken(model.tokens, state.token);
  return { ...sceneOf(data, model, state, { width, colours: COLOURS_OF_PAGE, chosen, visible: shownBy(model, state) }), state };
}

// The calls of a canvas that a function draws on.
function callsOf(draw) {
  const context = document.createElement("canvas").getContext();
  draw(context);
  return context.calls;
}

// The lane that a height is in.
const laneAt = (g, y) => Math.floor((y - g.top) / g.lane);
