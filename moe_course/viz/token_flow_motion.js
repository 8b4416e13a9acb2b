// Drawing what moves, on a canvas of its own. Nothing is made for a frame: columns, sheets and texts are ready.

const LEGS = { there: [1, 3], home: [3, 5] }; // when rows come in, and are shown as having come
const DOT = 7;
const GLYPH = 15;

// Every look of a dot, drawn once: columns are ranks, rows are kinds (travels, stays, travels for nothing).
function dotSheet(ranks, size, colours) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const cell = size + 3;
  const canvas = h("canvas");
  const context = crisp(canvas, ranks * cell, 3 * cell);
  for (let rank = 0; rank < ranks; rank++) {
    for (let kind = 0; kind < 3; kind++) {
      const [x, y, r] = [(rank + 0.5) * cell, (kind + 0.5) * cell, size / 2 - 0.5];
      shape(context, kind === 1 ? "square" : "circle", x, y, kind === 1 ? r * 0.9 : r);
      context.fillStyle = kind === 2 ? colours.background : rankColour(rank);
      context.globalAlpha = kind === 2 ? 0.8 : 1;
      context.fill();
      context.lineWidth = kind === 2 ? 1.2 : 0.8;
      context.strokeStyle = kind === 2 ? rankColour(rank) : colours.background;
      context.stroke();
    }
  }
  return { canvas, cell, ratio };
}

// Every token's text, drawn once in black and once in white.
function glyphSheet(tokens) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const columns = Math.min(64, tokens.length);
  const lines = Math.ceil(tokens.length / columns);
  const canvas = h("canvas");
  const context = crisp(canvas, columns * GLYPH, 2 * lines * GLYPH);
  context.textAlign = "center";
  context.textBaseline = "middle";
  tokens.forEach((token, i) => {
    const text = shortText(token.text, 2);
    context.font = `bold ${text.length > 1 ? 9 : 11}px ui-monospace, "DejaVu Sans Mono", monospace`;
    for (const ink of [0, 1]) {
      context.fillStyle = ink ? "#ffffff" : "#000000";
      context.fillText(text, ((i % columns) + 0.5) * GLYPH, (ink * lines + Math.floor(i / columns) + 0.55) * GLYPH);
    }
  });
  return { canvas, ratio, columns, lines };
}

// What moves, at time t.
function drawMoving(context, scene, t) {
  const { groups, chosen } = scene;
  context.textBaseline = "middle";
  drawLit(context, scene, t);
  for (const part of groups) if (t > part.begin && t <= Math.max(part.end, part.hold)) drawGroup(context, scene, part, t);
  if (t > 4) drawSheet(context, scene.done(), scene.g, t - 4);
  if (chosen.length) drawChosen(context, scene);
  drawDoors(context, scene, t);
}

const eased = (u) => u * u * (3 - 2 * u);

function drawGroup(context, scene, part, t) {
  const { dots, glyphs, chosenMark } = scene;
  const passed = (t - part.begin) / (part.end - part.begin);
  const any = scene.chosen.length > 0;
  for (let round = 0; round < (any ? 2 : 1); round++) { // what is chosen comes last, so it lies on top
    context.globalAlpha = 1;
    const text = glyphs !== null && (round === 1 || part.n <= (part.begin < 3 ? 700 : 300));
    const { canvas, cell, ratio } = text ? dots.large : dots.small;
    const half = cell / 2;
    for (let i = 0; i < part.n; i++) {
      const token = part.token[i];
      if (any && (chosenMark[token] === 1) !== (round === 1)) continue;
      const u = Math.min(1, Math.max(0, (passed - part.start[i]) / (1 - STAGGER)));
      const x = part.x0[i] + (part.x1[i] - part.x0[i]) * u;
      const y = part.y0[i] + part.dy[i] * eased(u);
      const rank = (part.look[i] / 3) | 0;
      const kind = part.look[i] % 3;
      if (round === 0) context.globalAlpha = any ? 0.22 : kind === 2 ? 0.55 : 1;
      context.drawImage(canvas, rank * cell * ratio, kind * cell * ratio, cell * ratio, cell * ratio, x - half, y - half, cell, cell);
      if (text) {
        const line = (token / glyphs.columns) | 0;
        const ink = kind === 2 ? scene.plainInk : scene.inks[rank];
        context.drawImage(glyphs.canvas, (token % glyphs.columns) * GLYPH * ratio, (ink * glyphs.lines + line) * GLYPH * ratio, GLYPH * ratio, GLYPH * ratio, x - GLYPH / 2, y - GLYPH / 2, GLYPH, GLYPH);
      }
    }
  }
  context.globalAlpha = 1;
}

// Experts light up as they compute, and the bars of their ranks grow.
function drawLit(context, scene, t) {
  const { model, g, colours, shownLoad, loadTexts } = scene;
  const done = Math.min(1, Math.max(0, t - 2));
  drawSheet(context, scene.lit, g, done === 0 ? 0 : 0.25 + 0.75 * done);
  const most = model.mostLoad || 1;
  context.textAlign = "left";
  context.lineWidth = 1;
  for (let r = 0; r < g.R; r++) {
    const y = g.laneTop(r) + g.lane / 2;
    const full = (g.loadWidth * model.load[r]) / most;
    context.fillStyle = context.strokeStyle = rankColour(r);
    context.globalAlpha = 0.25;
    context.fillRect(g.loadAt, y - 1, full, 12);
    context.globalAlpha = 1;
    context.fillRect(g.loadAt, y - 1, ((g.loadWidth * shownLoad[r]) / most) * done, 12);
    context.strokeRect(g.loadAt + 0.5, y - 0.5, Math.max(0, full - 1), 11);
    context.fillStyle = colours.text;
    context.font = model.load[r] === most ? scene.boldFont : scene.plainFont;
    context.fillText(loadTexts[r], g.loadAt, y - 10, g.loadWidth);
  }
}

function drawSheet(context, sheet, g, alpha) {
  if (alpha === 0) return;
  context.globalAlpha = alpha;
  context.drawImage(sheet, 0, 0, g.width, g.height);
  context.globalAlpha = 1;
}

// All experts that compute, lit by their number of routes.
function litSheet(model, g, shownOfExpert) {
  const canvas = h("canvas");
  const context = crisp(canvas, g.width, g.height);
  const { w } = g.expertTile;
  context.font = "9px ui-sans-serif, system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  shownOfExpert.forEach((n, e) => {
    if (n === 0) return;
    const { x, y } = g.experts[e];
    const colour = heat(model.mostOfExpert > 1 ? (n - 1) / (model.mostOfExpert - 1) : 1);
    context.fillStyle = colour;
    context.fillRect(x + 1, y + 1, Math.max(1, w - 2), Math.max(1, w - 2));
    context.fillStyle = inkOn(colour);
    if (w >= 20) context.fillText(String(e), x + w / 2, y + w / 2 + 0.5);
  });
  return canvas;
}

// How many rows have come in, at each rank's door.
function drawDoors(context, scene, t) {
  const { g, colours, into } = scene;
  if (t <= 1 || t > 4 || (t > 2.6 && t <= 3)) return;
  context.font = scene.plainFont;
  context.textAlign = t <= 3 ? "right" : "left";
  for (let r = 0; r < g.R; r++) {
    if (into[r] === 0) continue;
    const text = scene.countText(into[r]);
    const wide = 6.8 * text.length + 6;
    const x = t <= 3 ? g.inbox - 10 : g.router + 6;
    context.globalAlpha = 0.85;
    context.fillStyle = colours.background;
    context.fillRect(t <= 3 ? x - wide + 3 : x - 3, g.laneTop(r) + g.lane - 17, wide, 15);
    context.globalAlpha = 1;
    context.fillStyle = colours.text;
    context.fillText(text, x, g.laneTop(r) + g.lane - 9);
  }
}

// Rows that have arrived by time t: into each rank in `scene.into`, and as [rows there, rows home].
function countArrivals(scene, t) {
  const { counting, into, share, all } = scene;
  for (let leg = 0; leg < 2; leg++) {
    const total = leg === 0 ? scene.there : scene.home;
    const [begin, end] = leg === 0 ? LEGS.there : LEGS.home;
    const now = t > begin && t <= end;
    if (!now) { scene.arrived[leg] = t > end ? total.rows : 0; continue; }
    arrivals(counting[leg], t, share, all);
    let counted = 0;
    for (let r = 0; r < into.length; r++) counted += into[r] = Math.round(total.into[r] * share[r]);
    scene.arrived[leg] = counted;
  }
}

// Finished rows: below each token a strip of the ranks its contributions came from, by their number.
function doneSheet(model, g, visible, chosenMark, any) {
  const canvas = h("canvas");
  const context = crisp(canvas, g.width, g.height);
  const { w, h: high } = g.tokenTile;
  const thick = Math.max(2, Math.min(4, high * 0.2));
  model.routesOf.forEach((routes, token) => {
    const owners = routes.filter(visible).map((i) => model.owner[i]).sort((a, b) => a - b);
    const { x, y } = g.tokens[token];
    context.globalAlpha = any && chosenMark[token] === 0 ? 0.3 : 1;
    owners.forEach((owner, at) => {
      context.fillStyle = rankColour(owner);
      context.fillRect(x + (w * at) / owners.length, y + high - thick, w / owners.length + 0.2, thick);
    });
  });
  return canvas;
}
