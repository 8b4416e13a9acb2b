// Drawing what stands still: lanes, tokens, experts, and the ways of what is chosen. Done once for each choice.

const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const heat = (x) => CIVIDIS[Math.min(CIVIDIS.length - 1, Math.floor(Math.max(0, x) * CIVIDIS.length))];

// Black or white, whichever can be read on a colour.
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000000" : "#ffffff";
}

function shape(context, mark, x, y, r) {
  context.beginPath();
  if (mark === "square") context.rect(x - r, y - r, 2 * r, 2 * r);
  else if (mark === "triangle") { context.moveTo(x, y - r); context.lineTo(x + r, y + r); context.lineTo(x - r, y + r); }
  else if (mark === "diamond") { context.moveTo(x, y - r); context.lineTo(x + r, y); context.lineTo(x, y + r); context.lineTo(x - r, y); }
  else context.arc(x, y, r, 0, 2 * Math.PI);
  context.closePath();
}

const shortText = (text, most) => (text.length <= most ? text : text.startsWith("·") ? "·" : text.slice(0, Math.max(1, most - 1)) + "…");

// Lanes, tokens, router, doors and experts: all that stands still. `chosen` are the tokens that are selected.
function drawStill(context, { data, model, g, colours, chosen, visible, expert, rank }) {
  context.textBaseline = "middle";
  const shownToken = new Uint8Array(model.tokens.length);
  for (let i = 0; i < model.n; i++) if (visible(i)) shownToken[model.token[i]] = 1;
  heads(context, data, g, colours);
  for (let r = 0; r < g.R; r++) drawLane(context, data, model, g, colours, r, rank === null || rank === r);
  const { w, h: high } = g.tokenTile;
  const size = Math.min(high * 0.8, 15);
  const fits = Math.max(2, Math.floor(w / (size * 0.6)));
  context.textAlign = "center";
  context.font = `${size}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace`;
  model.tokens.forEach((token, i) => {
    const { x, y } = g.tokens[i];
    const picked = chosen.includes(i);
    context.globalAlpha = shownToken[i] && (!chosen.length || picked) ? 1 : 0.4;
    context.fillStyle = high >= 7 ? colours.background : rankColour(token.rank); // too small for a text: a dot
    context.fillRect(x, y, w, high);
    if (high >= 7) {
      context.strokeStyle = picked ? colours.text : rankColour(token.rank);
      context.lineWidth = picked ? 2.5 : 1;
      context.strokeRect(x + 0.5, y + 0.5, w - 1, high - 1);
      if (size >= 7) {
        context.fillStyle = colours.text;
        context.fillText(shortText(token.text, fits), x + w / 2, y + high / 2 + 0.5, w - 2);
      }
    }
  });
  context.globalAlpha = 1;
  if (Math.max(...model.tokensOf.map((list) => list.length)) <= 2) drawTextsSoFar(context, data, model, g, colours);
  drawExperts(context, model, g, colours, expert);
}

// In a step of decoding: the end of the text that the token continues.
function drawTextsSoFar(context, data, model, g, colours) {
  context.textAlign = "right";
  context.fillStyle = colours.muted;
  context.font = '12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
  const most = Math.floor((g.tokensWidth - g.tokenTile.w - 16) / 7.3);
  model.tokens.forEach((token, i) => {
    const text = textBefore(data, token);
    context.fillText(text.length > most ? "…" + text.slice(1 - most) : text, g.tokens[i].x - 5, g.tokens[i].y + g.tokenTile.h / 2);
  });
}

function heads(context, data, g, colours) {
  context.font = "bold 11px ui-sans-serif, system-ui, sans-serif";
  context.fillStyle = colours.muted;
  const head = (text, x, align) => { context.textAlign = align; context.fillText(text, x, 11); };
  head(g.narrow ? "tokens" : data.reduce ? "tokens, on all ranks that share them" : "tokens, each at its source rank", g.tokensAt, "left");
  head("router", g.router, "center");
  if (!g.narrow) head("between ranks", (g.router + g.inbox) / 2 + 8, "center");
  head(g.narrow ? "experts" : `experts: ${whole(g.held[0].length)} a rank`, g.expertsAt, "left");
  head(g.narrow ? "routes" : "routes computed", g.loadAt, "left");
}

function drawLane(context, data, model, g, colours, r, lit) {
  const y = g.laneTop(r);
  context.fillStyle = colours.panel;
  context.fillRect(0, y + 1, g.width, g.lane - 2);
  context.fillStyle = rankColour(r);
  context.fillRect(0, y + 1, 4, g.lane - 2);
  shape(context, rankMark(r), 14, y + g.lane / 2 - 7, 5);
  context.fill();
  context.fillStyle = colours.text;
  context.globalAlpha = lit ? 1 : 0.5;
  context.textAlign = "left";
  context.font = "bold 12px ui-sans-serif, system-ui, sans-serif";
  context.fillText(g.narrow ? String(r) : `rank ${r}`, 23, y + g.lane / 2 - 7);
  context.font = "11px ui-sans-serif, system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.fillText(g.narrow ? `${model.tokensOf[r].length} tok.` : counted(model.tokensOf[r].length, "token"), 9, y + g.lane / 2 + 9);
  context.globalAlpha = 1;
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  for (const x of [g.router, g.inbox]) {
    context.beginPath();
    context.moveTo(x, y + 6);
    context.lineTo(x, y + g.lane - 6);
    context.stroke();
  }
  if (!data.capacity) return;
  drawPlaces(context, data, model, g, colours, r);
  context.font = "11px ui-sans-serif, system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.fillText(`of ${whole(g.held[r].length * data.ranks * data.capacity)} places`, g.loadAt, y + g.lane / 2 + 20, g.loadWidth);
}

// The padded buffer of a rank: places for every expert, hatched where they stay empty.
function drawPlaces(context, data, model, g, colours, r) {
  const places = g.held[r].length * data.ranks * data.capacity;
  const [x, y, height] = [g.inbox - 5, g.laneTop(r) + 6, g.lane - 12];
  const full = Math.max(1, (height * model.load[r]) / places);
  context.fillStyle = colours.background;
  context.fillRect(x, y, 10, height);
  context.strokeStyle = colours.muted;
  context.lineWidth = 0.7;
  context.beginPath();
  for (let at = 0; at < height - 5; at += 5) { context.moveTo(x, y + at + 6); context.lineTo(x + 10, y + at); }
  context.stroke();
  context.strokeRect(x, y, 10, height);
  context.fillStyle = rankColour(r);
  context.fillRect(x, y + height - full, 10, full);
}

function drawExperts(context, model, g, colours, expert) {
  const { w } = g.expertTile;
  context.textAlign = "center";
  context.font = "9px ui-sans-serif, system-ui, sans-serif";
  g.experts.forEach(({ x, y }, e) => {
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, Math.max(1, w - 1), Math.max(1, w - 1));
    if (e === expert) {
      context.strokeStyle = colours.text;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, w + 2, w + 2);
    }
    if (w >= 20) {
      context.fillStyle = colours.muted;
      context.fillText(String(e), x + w / 2, y + w / 2 + 0.5);
    }
  });
}

// The ways of the chosen routes, ready to draw: as wide as the weight, in the colour of the rank that computes it.
function pathsOf(data, model, g, routes) {
  return routes.map((i) => {
    const token = model.token[i];
    const [source, owner] = [model.source[i], model.owner[i]];
    const stops = [points.token(g, token), points.port(g, model, token, model.k[i]), points.door(g, model, token, owner)];
    if (data.shape === "two_hop") stops.splice(2, 0, points.half(g, model, token, model.via[i] < 0 ? source : model.via[i]));
    const path = new Path2D();
    path.moveTo(...stops[0]);
    for (let s = 1; s < stops.length; s++) {
      const [[x0, y0], [x1, y1]] = [stops[s - 1], stops[s]];
      path.bezierCurveTo((x0 + x1) / 2, y0, (x0 + x1) / 2, y1, x1, y1);
    }
    path.lineTo(...points.expert(g, model.expert[i]));
    return { path, colour: rankColour(owner), width: 1 + 3 * Math.min(1, model.weight[i]), dash: source === owner ? [5, 3] : [] };
  });
}

// The numbers of the chosen experts, above their tiles, or below where another number is in the way.
function labelsOf(model, g, routes) {
  const found = [];
  const { w } = g.expertTile;
  for (const i of [...routes].sort((a, b) => model.expert[a] - model.expert[b])) {
    const { x, y } = g.experts[model.expert[i]];
    const text = String(model.expert[i]);
    const wide = 7 * text.length + 6;
    const left = Math.min(x + w / 2 - wide / 2, g.loadAt - wide - 2);
    const free = (top) => found.every((other) => left + wide < other.left || other.left + other.wide < left || Math.abs(top - other.top) > 13);
    const top = [y - 14, y + w + 1, y - 28, y + w + 15].find(free) ?? y - 14;
    found.push({ text, left, top, wide, x, y, colour: rankColour(model.owner[i]) });
  }
  return found;
}

function drawChosen(context, { paths, labels, g, colours }) {
  const { w } = g.expertTile;
  context.globalAlpha = 0.85;
  for (const { path, colour, width, dash } of paths) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.stroke(path);
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
  context.font = "bold 11px ui-sans-serif, system-ui, sans-serif";
  context.textAlign = "left";
  context.lineWidth = 2;
  context.strokeStyle = colours.text;
  for (const { x, y } of labels) context.strokeRect(x, y, w, w);
  for (const { text, left, top, wide, colour } of labels) {
    context.fillStyle = colours.text;
    context.fillRect(left, top, wide, 13);
    context.fillStyle = colour;
    context.fillRect(left, top + 11, wide, 2);
    context.fillStyle = colours.background;
    context.fillText(text, left + 3, top + 6);
  }
}
