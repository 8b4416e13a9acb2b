// The chosen token's experts: a double frame around each tile, its number above or below the grid, its dot beside that.

const PILL = 14;
const BADGE = 17; // the dot of a chosen token, with its text

// Where the numbers go: above or below the grid, each as near to its tile as the others let it.
function labelsOf(model, g, routes) {
  const byRank = new Map();
  for (const i of routes) byRank.set(model.owner[i], [...(byRank.get(model.owner[i]) ?? []), i]);
  return [...byRank].flatMap(([rank, list]) => placed(model, g, rank, list, BADGE) ?? placed(model, g, rank, list, 0) ?? []);
}

// One rank's, with `room` for a dot in each; null where they do not fit.
function placed(model, g, rank, routes, room) {
  const { w } = g.expertTile;
  const all = routes.map((i) => {
    const { x, y } = g.experts[model.expert[i]];
    const text = String(model.expert[i]);
    return { i, text, x, y, room, wide: 7 * text.length + 6 + room, colour: rankColour(model.owner[i]) };
  }).sort((a, b) => a.x - b.x || a.y - b.y);
  const { top, bottom } = g.grids[rank];
  let below = all.map((one) => one.y + w / 2 > (top + bottom) / 2 + 0.5);
  let best = costOf(g, rank, all, below);
  for (let better = true; better;) { // one number changes sides, as long as that makes the lines shorter
    better = false;
    for (let at = 0; at < all.length; at++) {
      const other = below.map((side, i) => (i === at ? !side : side));
      const cost = costOf(g, rank, all, other);
      if (cost < best) [below, best, better] = [other, cost, true];
    }
  }
  costOf(g, rank, all, below);
  return best < TOO_MUCH ? all : null;
}

const TOO_MUCH = 1e9;

// Puts the numbers of a rank on these sides; what their lines cost: a long one costs more than two short ones.
function costOf(g, rank, all, below) {
  const { top, bottom } = g.grids[rank];
  const { w } = g.expertTile;
  const [from, to] = [g.expertsAt - 6, g.loadAt - 4];
  for (const side of [false, true]) sideBySide(all.filter((_, i) => below[i] === side), w, from, to);
  let [cost, free] = [0, [from, from]];
  all.forEach((one, i) => {
    const { left, wide, room, x, y } = one;
    one.top = below[i] ? bottom + 3 : top - PILL - 3;
    const foot = Math.min(left + wide - 3, Math.max(left + room + 3, x + w / 2));
    one.leader = below[i] ? [foot, one.top, x + w / 2, y + w + 2] : [foot, one.top + PILL, x + w / 2, y - 2];
    cost += (one.leader[2] - foot) ** 2 + (one.leader[3] - one.leader[1]) ** 2;
    free[Number(below[i])] += wide + 3;
  });
  for (const end of free) cost += end - 3 > to ? TOO_MUCH * (end - to) : 0;
  return cost;
}

// Numbers in a line, in the order of their tiles. Those that would overlap form a block around the mean of their
// wishes, and blocks that meet become one.
function sideBySide(band, w, from, to) {
  const blocks = [];
  for (const one of band) {
    let block = { ones: [one], wide: one.wide + 3, wish: one.x + w / 2 - one.wide / 2 }; // wish: of its left edge
    while (blocks.length && blocks.at(-1).wish + blocks.at(-1).wide > block.wish) {
      const before = blocks.pop();
      const n = before.ones.length;
      const ones = [...before.ones, ...block.ones];
      block = { ones, wide: before.wide + block.wide, wish: (n * before.wish + block.ones.length * (block.wish - before.wide)) / ones.length };
    }
    blocks.push(block);
  }
  let free = from;
  for (const block of blocks) free = (block.left = Math.max(free, block.wish)) + block.wide;
  free = to + 3;
  for (const block of blocks.reverse()) free = block.left = Math.min(block.left, free - block.wide);
  for (const { ones, left } of blocks) ones.reduce((at, one) => (one.left = at) + one.wide + 3, left);
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
