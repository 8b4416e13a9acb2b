// Drawing what stands still: lanes, router, doors, experts, and the ways of what is chosen. Done once for each choice.

const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const heat = (x, scale) => scale[Math.min(scale.length - 1, Math.floor(Math.max(0, x) * scale.length))];
// The darkest colours would look like empty experts in a dark page.
const scaleOn = (background) => (inkOn(background) === "#ffffff" ? CIVIDIS.slice(2) : CIVIDIS);

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

// Lanes, router, doors and experts: all that stands still.
function drawStill(context, { data, model, g, colours, expert, rank }) {
  context.textBaseline = "middle";
  heads(context, data, g, colours);
  for (let r = 0; r < g.R; r++) drawLane(context, data, model, g, colours, r, rank === null || rank === r);
  if (g.continuing) drawTextsSoFar(context, data, model, g, colours);
  drawExperts(context, g, colours, expert);
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
  context.fillStyle = colours.lane;
  context.fillRect(0, y + 1, g.width, g.lane - 2);
  context.fillStyle = rankColour(r);
  context.fillRect(0, y + 1, 4, g.lane - 2);
  const middle = y + g.lane / 2;
  shape(context, rankMark(r), 14, middle - g.line, 5);
  context.fill();
  context.fillStyle = colours.text;
  context.globalAlpha = lit ? 1 : 0.5;
  context.textAlign = "left";
  context.font = "bold 12px ui-sans-serif, system-ui, sans-serif";
  context.fillText(g.narrow ? String(r) : `rank ${r}`, 23, middle - g.line);
  context.font = "11px ui-sans-serif, system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.fillText(g.narrow ? `${model.tokensOf[r].length} tok.` : counted(model.tokensOf[r].length, "token"), 9, middle, g.label - 13);
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
  drawPlaces(context, g, colours, r);
  context.font = "11px ui-sans-serif, system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.fillText(`of ${whole(g.held[r].length * data.ranks * data.capacity)} places`, g.loadAt, y + g.lane / 2 + 20, g.loadWidth);
}

const NAME = 34; // pixels of a rank's mark and number

// The ranks once more, on a strip that stays in sight while a narrow page shows what is further right.
function drawNames(context, { g, colours }) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.font = "bold 12px ui-sans-serif, system-ui, sans-serif";
  for (let r = 0; r < g.R; r++) {
    const middle = g.laneTop(r) + g.lane / 2 - g.line;
    context.fillStyle = colours.lane;
    context.fillRect(0, middle - 9, NAME, 18);
    context.fillStyle = rankColour(r);
    context.fillRect(0, g.laneTop(r) + 1, 4, g.lane - 2);
    shape(context, rankMark(r), 14, middle, 5);
    context.fill();
    context.fillStyle = colours.text;
    context.fillText(String(r), 23, middle);
  }
}

// The padded buffer of a rank: places for every expert, hatched while they are empty.
function drawPlaces(context, g, colours, r) {
  const [x, y, height] = [g.inbox - 5, g.laneTop(r) + 6, g.lane - 12];
  context.fillStyle = colours.background;
  context.fillRect(x, y, 10, height);
  context.strokeStyle = colours.muted;
  context.lineWidth = 0.7;
  context.beginPath();
  for (let at = 0; at < height - 5; at += 5) { context.moveTo(x, y + at + 6); context.lineTo(x + 10, y + at); }
  context.stroke();
  context.strokeRect(x, y, 10, height);
}

function drawExperts(context, g, colours, expert) {
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
    const [x, y] = points.expert(g, model.expert[i]);
    path.lineTo(x - g.expertTile.w / 2 - 2, y); // up to its frame, not over its colour
    return { path, colour: rankColour(owner), width: 1 + 3 * Math.min(1, model.weight[i]), dash: source === owner ? [5, 3] : [] };
  });
}
