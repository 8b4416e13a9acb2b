// What is drawn once and then copied into each frame: dots of every look, texts, experts at work.

const DOT = 7;
const GLYPH = 15;

// Every look of a dot, drawn once: columns are ranks, rows are kinds (travels, stays, travels for nothing).
function dotSheet(ranks, size, colours) {
  const ratio = pixelRatio();
  const cell = size + 3;
  const canvas = h("canvas");
  const context = crisp(canvas, ranks * cell, 3 * cell);
  for (let rank = 0; rank < ranks; rank++) {
    for (let kind = 0; kind < 3; kind++) {
      const [x, y, r] = [(rank + 0.5) * cell, (kind + 0.5) * cell, size / 2 - 0.5];
      shape(context, kind === 1 ? "square" : "circle", x, y, kind === 1 ? r * 0.9 : r);
      context.fillStyle = kind === 2 ? colours.background : rankColour(rank);
      context.fill();
      context.lineWidth = kind === 2 ? 1.8 : 0.8;
      context.strokeStyle = kind === 2 ? rankColour(rank) : colours.background;
      context.stroke();
    }
  }
  return { canvas, cell, ratio };
}

// Every token's text, drawn once in black and once in white.
function glyphSheet(tokens) {
  const ratio = pixelRatio();
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

// The dots of a chosen token: larger, framed, with its text. Columns are ranks, rows are kinds, as in `dotSheet`.
function badgeSheet(ranks, text, colours) {
  const ratio = pixelRatio();
  const cell = BADGE + 4;
  const canvas = h("canvas");
  const context = crisp(canvas, ranks * cell, 3 * cell);
  const short = shortText(text, 2);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `bold ${short.length > 1 ? 9 : 12}px ui-monospace, "DejaVu Sans Mono", monospace`;
  for (let rank = 0; rank < ranks; rank++) {
    for (let kind = 0; kind < 3; kind++) {
      const [x, y] = [(rank + 0.5) * cell, (kind + 0.5) * cell];
      const around = (r) => shape(context, kind === 1 ? "square" : "circle", x, y, kind === 1 ? r * 0.9 : r);
      for (const [colour, r] of [[colours.text, BADGE / 2 + 1], [colours.background, BADGE / 2], [rankColour(rank), BADGE / 2 - 1]]) {
        context.fillStyle = colour;
        around(r);
        context.fill();
      }
      if (kind === 2) {
        context.fillStyle = colours.background;
        around(BADGE / 2 - 3);
        context.fill();
      }
      context.fillStyle = kind === 2 ? colours.text : inkOn(rankColour(rank));
      context.fillText(short, x, y + 0.5);
    }
  }
  return { canvas, cell, ratio };
}

// All experts that compute, lit by their number of routes.
function litSheet(model, g, colours, shownOfExpert) {
  const canvas = h("canvas");
  const context = crisp(canvas, g.width, g.height);
  const { w } = g.expertTile;
  const scale = scaleOn(colours.background);
  context.font = "9px ui-sans-serif, system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  shownOfExpert.forEach((n, e) => {
    if (n === 0) return;
    const { x, y } = g.experts[e];
    const colour = heat(model.mostOfExpert > 1 ? (n - 1) / (model.mostOfExpert - 1) : 1, scale);
    context.fillStyle = colour;
    context.fillRect(x + 1, y + 1, Math.max(1, w - 2), Math.max(1, w - 2));
    context.fillStyle = inkOn(colour);
    if (w >= 20) context.fillText(String(e), x + w / 2, y + w / 2 + 0.5);
  });
  return canvas;
}

// Rows at their experts: small dots in the lower part of each tile, in the colours of the ranks they come from. Where
// more rows come than fit, those shown have the colours in proportion.
function restSheet({ model, g, colours, chosenMark, chosen, visible }) {
  const canvas = h("canvas");
  const context = crisp(canvas, g.width, g.height);
  const { w } = g.expertTile;
  const pitch = Math.min(4.4, (w - 1) / 2);
  const columns = Math.floor((w - 1) / pitch);
  const most = columns * Math.max(1, Math.floor((w * 0.45) / pitch));
  if (pitch < 2.5) return canvas;
  const guests = new Map();
  for (let i = 0; i < model.n; i++) {
    if (!visible(i) || chosenMark[model.token[i]]) continue;
    const list = guests.get(model.expert[i]) ?? [];
    guests.set(model.expert[i], list);
    list.push(model.source[i]);
  }
  context.globalAlpha = chosen.length ? 0.6 : 1;
  context.lineWidth = 0.6;
  context.strokeStyle = "#ffffff";
  for (const [expert, list] of guests) {
    const { x, y } = g.experts[expert];
    const n = Math.min(most, list.length);
    list.sort((a, b) => a - b);
    for (let at = 0; at < n; at++) {
      const [column, line] = [at % columns, Math.floor(at / columns)];
      shape(context, "circle", x + w / 2 + (column - (columns - 1) / 2) * pitch, y + w - 0.8 - (line + 0.5) * pitch, pitch * 0.44);
      context.fillStyle = rankColour(list[Math.floor(((at + 0.5) * list.length) / n)]);
      context.fill();
      context.stroke();
    }
  }
  return canvas;
}
