// Where everything stands, and who moves from where to where when. Worked out once for a pass, a width and a filter.

const MOST_MOVING = 1500; // dots that one group draws at most; all are counted
const STAGGER = 0.6; // the last dot starts when this part of its window is over

// The largest tile (width = ratio * height) with which n of them fit into an area.
function fitTiles(n, width, height, ratio, most, gap = 1) {
  for (let size = most; size > 2; size -= 0.5) {
    const columns = Math.max(1, Math.floor(width / (size * ratio + gap)));
    if (columns * Math.floor(height / (size + gap)) >= n) return { columns, w: size * ratio, h: size, gap };
  }
  const columns = Math.max(1, Math.ceil(Math.sqrt((n * width) / height)));
  return { columns, w: width / columns, h: height / Math.ceil(n / columns), gap: 0 };
}

function layout(data, model, width) {
  const R = data.ranks;
  const narrow = width < 760;
  const lane = Math.max(44, Math.min(104, Math.floor(560 / R)));
  const top = 24;
  const label = narrow ? 56 : 78;
  const load = narrow ? 92 : 128;
  const room = width - label - load;
  const g = {
    R, lane, top, label, narrow, width, height: top + lane * R + 2,
    tokensAt: label, tokensWidth: room * 0.36, router: label + room * 0.36 + 24,
    inbox: label + room * 0.68, expertsAt: label + room * 0.68 + 14, expertsWidth: room * 0.32 - 22,
    loadAt: width - load, loadWidth: load - 8, tokens: [], experts: [],
    laneTop: (rank) => top + lane * rank,
  };
  const lengths = model.tokens.map((token) => token.text.length).sort((a, b) => a - b);
  const typical = Math.min(7, Math.max(1, lengths[Math.floor(lengths.length * 0.8)] ?? 1));
  const ratio = Math.max(0.86, (0.62 * typical + 0.35) * 0.72);
  const mostTokens = Math.max(1, ...model.tokensOf.map((list) => list.length));
  g.tokenTile = fitTiles(mostTokens, g.tokensWidth - 4, lane - 14, ratio, 26);
  model.tokensOf.forEach((list, rank) => list.forEach((token, i) => {
    const { columns, w, h, gap } = g.tokenTile;
    if (mostTokens <= 2) { // a step of decoding: the text so far, then the token
      g.tokens[token] = { x: g.tokensAt + g.tokensWidth - w - 6, y: g.laneTop(rank) + (lane * (i + 1)) / (list.length + 1) - h / 2, i, of: list.length };
      return;
    }
    g.tokens[token] = { x: g.tokensAt + (i % columns) * (w + gap), y: g.laneTop(rank) + 7 + Math.floor(i / columns) * (h + gap), i, of: list.length };
  }));
  const held = Array.from({ length: R }, () => []);
  data.owner.forEach((rank, expert) => held[rank].push(expert));
  g.held = held;
  g.expertTile = fitTiles(Math.max(...held.map((list) => list.length)), g.expertsWidth, lane - 22, 1, 28);
  held.forEach((list, rank) => {
    const { columns, w, h, gap } = g.expertTile;
    const lines = Math.ceil(list.length / columns);
    const up = (lane - lines * (h + gap)) / 2;
    list.forEach((expert, i) => {
      g.experts[expert] = { x: g.expertsAt + (i % columns) * (w + gap), y: g.laneTop(rank) + up + Math.floor(i / columns) * (h + gap) };
    });
  });
  return g;
}

// Points on the way: the middle of a token's tile, its place at the router (one per k), a rank's door, an expert's tile.
const points = {
  token: (g, token) => [g.tokens[token].x + g.tokenTile.w - 2, g.tokens[token].y + g.tokenTile.h / 2],
  port: (g, model, token, k) => {
    const { i, of } = g.tokens[token];
    return [g.router, g.laneTop(model.tokens[token].rank) + 8 + ((i + (k + 0.5) / model.mostK) / of) * (g.lane - 16)];
  },
  door: (g, model, token, rank) => [g.inbox, g.laneTop(rank) + 10 + ((token + 0.5) / model.tokens.length) * (g.lane - 20)],
  half: (g, model, token, rank) => [(g.router + g.inbox) / 2, points.door(g, model, token, rank)[1]],
  expert: (g, expert) => [g.experts[expert].x + g.expertTile.w / 2, g.experts[expert].y + g.expertTile.h / 2],
};

// A group of dots that move together in the window begin..end, in columns sorted by look. `parts` are pairs of a list
// and what makes a move of one of its items; only moves that are drawn are made.
function group(begin, end, parts, hold) {
  const total = parts.reduce((sum, [items]) => sum + items.length, 0);
  const stride = Math.ceil(total / MOST_MOVING) || 1;
  const few = Math.min(1, total / 12);
  const kept = [];
  let i = 0;
  for (const [items, make] of parts) {
    items.forEach((item, at) => {
      // the golden ratio mixes the starts evenly, whatever the order of the moves
      if (i % stride === 0) kept.push(Object.assign(make(item, at), { start: ((kept.length * 0.6180339887) % 1) * STAGGER * few }));
      i += 1;
    });
  }
  kept.sort((a, b) => a.look - b.look);
  const column = (name, Kind) => Kind.from(kept, (move) => move[name]);
  return {
    begin, end, hold, stride, n: kept.length, look: column("look", Int32Array), token: column("token", Int32Array),
    x0: column("x0", Float32Array), y0: column("y0", Float32Array), x1: column("x1", Float32Array), y1: column("y1", Float32Array),
    start: column("start", Float32Array), dy: column("dy", Float32Array), to: column("to", Int32Array),
  };
}

// A look is a colour (the rank it comes from) and a kind: 0 travels, 1 stays on its rank, 2 travels for nothing.
const lookOf = (rank, kind) => rank * 3 + kind;

function groupsOf(data, model, g, visible) {
  const { there, home } = travelling(data, model, visible);
  const move = (token, from, to, look, rank = -1) => ({ token, x0: from[0], y0: from[1], x1: to[0], y1: to[1], dy: to[1] - from[1], look, to: rank });
  const shown = [];
  for (let i = 0; i < model.n; i++) if (visible(i)) shown.push(i);
  const crosses = (i) => (model.source[i] === model.owner[i] ? 1 : 0);
  const door = (token, rank) => points.door(g, model, token, rank);
  const half = (token, rank) => points.half(g, model, token, rank);
  const port = (token) => points.port(g, model, token, (model.mostK - 1) / 2);
  const hops = data.shape === "two_hop";
  const toRouter = (i) => move(model.token[i], points.token(g, model.token[i]), points.port(g, model, model.token[i], model.k[i]), lookOf(model.source[i], crosses(i)));
  const groups = [group(0, 1, [[shown, toRouter]], 0)];
  // rows on their way: those that stay at home move too, as squares, and are not counted
  const stay = [...new Map(shown.filter((i) => model.source[i] === model.owner[i]).map((i) => [model.token[i], i])).values()];
  const staying = (from, to) => (i) => move(model.token[i], from(model.token[i], model.source[i]), to(model.token[i], model.source[i]), lookOf(model.source[i], 1));
  const copying = (from, to) => (copy, at) => move(copy[0], from(copy[0], copy[1], at), to(copy[0], copy[2]), lookOf(copy[1], copy[3] ? 0 : 2), copy[2]);
  const leg = (copies, hop) => copies.filter((copy) => copy[4] === hop);
  const single = data.shape === "all_to_all" || data.shape === "low_latency"; // then rows of one token differ by k
  const ks = shown.filter((i) => model.source[i] !== model.owner[i]).map((i) => model.k[i]);
  const starts = (token, rank, at) => (single ? points.port(g, model, token, ks[at]) : port(token));
  const mid = hops ? 1.4 : 1.72;
  const land = hops ? half : door;
  groups.push(group(1, mid, [[stay, staying(port, land)], [leg(there, 0), copying(starts, land)]], mid));
  if (hops) groups.push(group(mid, 1.72, [[stay, staying(half, door)], [leg(there, 1), copying(half, door)]], 1.72));
  const toExperts = (i) => move(model.token[i], door(model.token[i], model.owner[i]), points.expert(g, model.expert[i]), lookOf(model.source[i], crosses(i)));
  groups.push(group(1.72, 2, [[shown, toExperts]], 2.02));
  const fromExperts = (i) => move(model.token[i], points.expert(g, model.expert[i]), door(model.token[i], model.owner[i]), lookOf(model.owner[i], crosses(i)));
  groups.push(group(3, 3.28, [[shown, fromExperts]], 3.28));
  const split = hops || data.shape === "no_dp_ep" ? 3.62 : 4;
  const tile = (token) => points.token(g, token);
  const rest = [stay, staying(door, tile)];
  if (split === 4) groups.push(group(3.28, 4, [rest, [leg(home, 0), copying(door, tile)]], 4));
  else groups.push(group(3.28, split, [[leg(home, 0), copying(door, half)]], split), group(split, 4, [rest, [leg(home, 1), copying(half, tile)]], 4));
  return groups;
}

// How many of the rows into each rank have arrived at time t, as shares 0..1: `groups` are those of one direction.
function arrivals(groups, t, share, all) {
  share.fill(0);
  all.fill(0);
  for (const part of groups) {
    const passed = (t - part.begin) / (part.end - part.begin);
    for (let i = 0; i < part.n; i++) {
      if (part.to[i] < 0) continue;
      all[part.to[i]] += 1;
      if (passed >= part.start[i] + 1 - STAGGER) share[part.to[i]] += 1;
    }
  }
  const [early, late] = [groups[0].begin, groups[groups.length - 1].end];
  const passed = Math.min(1, (t - early) / (late - early)); // for rows that a filter hides
  for (let rank = 0; rank < share.length; rank++) share[rank] = t >= late ? 1 : all[rank] ? share[rank] / all[rank] : passed;
}
