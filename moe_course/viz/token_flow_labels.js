// The chosen token's experts: a double frame around each tile, its number above or below the grid, its dot beside that.

const PILL = 14;
const BADGE = 17; // the dot of a chosen token, with its text

// Where the numbers go: the upper half's above the grid, the lower half's below, as many as fit side by side.
function labelsOf(model, g, routes) {
  const byRank = new Map();
  for (const i of routes) byRank.set(model.owner[i], [...(byRank.get(model.owner[i]) ?? []), i]);
  return [...byRank].flatMap(([rank, list]) => placed(model, g, rank, list, BADGE) ?? placed(model, g, rank, list, 0) ?? []);
}

// One rank's, with `room` for a dot in each; null where they do not fit.
function placed(model, g, rank, routes, room) {
  const { top, bottom } = g.grids[rank];
  const { w } = g.expertTile;
  const [from, to] = [g.expertsAt - 6, g.loadAt - 4];
  const all = routes.map((i) => {
    const { x, y } = g.experts[model.expert[i]];
    const text = String(model.expert[i]);
    return { i, text, x, y, room, wide: 7 * text.length + 6 + room, colour: rankColour(model.owner[i]) };
  }).sort((a, b) => a.x - b.x || a.y - b.y);
  const width = (band) => band.reduce((sum, one) => sum + one.wide + 3, 0);
  const upper = (one) => one.y + w / 2 <= (top + bottom) / 2 + 0.5;
  const bands = [all.filter(upper), all.filter((one) => !upper(one))];
  for (const [full, other] of [[0, 1], [1, 0]]) {
    while (width(bands[full]) > to - from) bands[other].push(bands[full].pop());
    bands[other].sort((a, b) => a.x - b.x);
  }
  if (bands.some((band) => width(band) > to - from)) return null;
  bands.forEach((band, below) => {
    let free = from;
    for (const one of band) {
      one.left = Math.max(free, one.x + w / 2 - one.wide / 2);
      free = one.left + one.wide + 3;
    }
    free = to;
    for (const one of [...band].reverse()) {
      one.left = Math.min(one.left, free - one.wide);
      free = one.left - 3;
      one.top = below ? bottom + 3 : top - PILL - 3;
      const foot = Math.min(one.left + one.wide - 3, Math.max(one.left + room + 3, one.x + w / 2));
      one.leader = below ? [foot, one.top, one.x + w / 2, one.y + w + 2] : [foot, one.top + PILL, one.x + w / 2, one.y - 2];
    }
  });
  return bands.flat();
}

// Where the dots of chosen tokens wait while their experts compute: in front of the number, route by route.
const berthsOf = (labels) => new Map(labels.filter((one) => one.room).map((one) => [one.i, [one.left + BADGE / 2, one.top + PILL / 2]]));

function drawPaths(context, { paths }, alpha) {
  context.globalAlpha = alpha;
  for (const { path, colour, width, dash } of paths) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.stroke(path);
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
}

// While the dots are in front of the numbers (`seated`), one plate holds both.
function drawLabels(context, { labels, g, colours }, seated) {
  const { w } = g.expertTile;
  context.font = "bold 11px ui-sans-serif, system-ui, sans-serif";
  context.textAlign = "left";
  for (const { x, y, leader } of labels) {
    context.lineWidth = 1.5;
    for (const [colour, out] of [[colours.background, 0], [colours.text, 1.5]]) {
      context.strokeStyle = colour;
      context.strokeRect(x - out, y - out, w + 2 * out, w + 2 * out);
    }
    context.beginPath();
    context.moveTo(leader[0], leader[1]);
    context.lineTo(leader[2], leader[3]);
    context.stroke();
  }
  for (const { text, left, top, wide, room, colour } of labels) {
    const free = seated ? 0 : room;
    context.fillStyle = colours.text;
    context.fillRect(left + free, top, wide - free, PILL);
    context.fillStyle = colour;
    context.fillRect(left + free, top + PILL - 2, wide - free, 2);
    context.fillStyle = colours.background;
    context.fillText(text, left + room + 3, top + PILL / 2);
  }
}
