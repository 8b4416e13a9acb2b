// Who moves from where to where when, in columns that a frame can draw without making anything.

const MOST_MOVING = 1500; // dots that move at the same time at most; all are counted
const STAGGER = 0.6; // the last dot starts when this part of its window is over

// A group of dots that move together in the window begin..end, in columns sorted by look. `parts` are pairs of a list
// and what makes a move of one of its items; only moves that are drawn are made, those of chosen tokens always.
// Its dots stay in sight until `hold`, those of chosen tokens until `rest`; `total` dots move in this window in all.
function group(begin, end, parts, chosen, { hold = end, rest = hold, total = parts.reduce((sum, [items]) => sum + items.length, 0) } = {}) {
  const stride = Math.ceil(total / MOST_MOVING) || 1;
  const few = Math.min(1, total / 12);
  const kept = [];
  let [i, mine] = [0, 0];
  for (const [items, make, tokenOf] of parts) {
    items.forEach((item, at) => {
      const picked = chosen[tokenOf(item)] === 1;
      if (picked || i % stride === 0) {
        const start = picked ? 0.25 + 0.25 * golden(mine++) : golden(kept.length) * STAGGER * few;
        kept.push(Object.assign(make(item, at), { start }));
      }
      i += 1;
    });
  }
  kept.sort((a, b) => a.look - b.look);
  const column = (name, Kind) => Kind.from(kept, (move) => move[name]);
  const token = column("token", Int32Array);
  return {
    begin, end, hold, rest, total, stride, n: kept.length, token, mine: [...token.keys()].filter((at) => chosen[token[at]] === 1), look: column("look", Int32Array),
    x0: column("x0", Float32Array), y0: column("y0", Float32Array), x1: column("x1", Float32Array), y1: column("y1", Float32Array),
    start: column("start", Float32Array), dy: column("dy", Float32Array), to: column("to", Int32Array),
  };
}

// A look is a colour (the rank it comes from) and a kind: 0 travels, 1 stays on its rank, 2 travels for nothing.
const lookOf = (rank, kind) => rank * 3 + kind;

// `berths` has a place beside the grid for each route of a chosen token; the others stop at their expert's tile.
function groupsOf(data, model, g, visible, berths) {
  const { there, home } = travelling(data, model, visible);
  const move = (token, from, to, look, rank = -1) => ({ token, x0: from[0], y0: from[1], x1: to[0], y1: to[1], dy: to[1] - from[1], look, to: rank });
  const shown = [];
  for (let i = 0; i < model.n; i++) if (visible(i)) shown.push(i);
  const stays = (i) => (model.source[i] === model.owner[i] ? 1 : 0);
  const door = (token, rank, k) => points.door(g, model, token, rank, k);
  const half = (token, rank) => points.half(g, model, token, rank);
  const tile = (token) => points.token(g, token);
  const seat = (i) => berths.get(i) ?? points.expert(g, model.expert[i]);
  const hops = data.shape === "two_hop";
  const single = data.shape === "all_to_all" || data.shape === "low_latency"; // then rows of one token differ by k
  const slot = (i) => (single ? model.k[i] : 0);
  const crossing = shown.filter((i) => !stays(i)).map((i) => model.k[i]);
  const first = new Map(); // the first choice that brings a token to a rank
  for (const i of shown) {
    const key = model.token[i] * data.ranks + model.owner[i];
    if (!first.has(key)) first.set(key, model.k[i]);
  }
  const port = (token, rank, to = rank) => points.port(g, model, token, first.get(token * data.ranks + to) ?? (model.mostK - 1) / 2);
  const leaving = (token, source, at, to) => (single ? points.port(g, model, token, crossing[at]) : port(token, source, to));
  const arriving = (token, rank, at) => door(token, rank, single ? crossing[at] : 0);

  const ofRoute = (i) => model.token[i];
  const ofCopy = ([token]) => token;
  const toRouter = (i) => move(model.token[i], tile(model.token[i]), points.port(g, model, model.token[i], model.k[i]), lookOf(model.source[i], stays(i)));
  const toExperts = (i) => move(model.token[i], door(model.token[i], model.owner[i], slot(i)), seat(i), lookOf(model.source[i], stays(i)));
  const fromExperts = (i) => move(model.token[i], seat(i), door(model.token[i], model.owner[i], slot(i)), lookOf(model.owner[i], stays(i)));
  const staying = (from, to) => (i) => move(model.token[i], from(model.token[i], model.source[i]), to(model.token[i], model.source[i]), lookOf(model.source[i], 1));
  const copying = (from, to) => (copy, at) => move(copy[0], from(copy[0], copy[1], at, copy[2]), to(copy[0], copy[2], at), lookOf(copy[1], copy[3] ? 0 : 2), copy[2]);
  // rows that stay at home move too, as squares, and are not counted
  const stay = [...new Map(shown.filter(stays).map((i) => [model.token[i], i])).values()];
  const stayers = (from, to) => [stay, staying(from, to), ofRoute];
  const copies = (all, hop, from, to, used = true) => [all.filter((copy) => copy[4] === hop && copy[3] === used), copying(from, to), ofCopy];
  const make = (begin, end, parts, more) => group(begin, end, parts, g.chosen, more);

  const groups = [make(0, 1, [[shown, toRouter, ofRoute]])];
  if (hops) {
    groups.push(make(1, 1.4, [stayers(port, half), copies(there, 0, (token, source) => port(token, source), half)]));
    groups.push(make(1.4, 1.72, [stayers(half, door), copies(there, 1, half, door)]));
  } else {
    const total = stay.length + there.length;
    groups.push(make(1, 1.72, [stayers(port, door), copies(there, 0, leaving, arriving)], { total }));
    groups.push(make(1, 1.72, [copies(there, 0, leaving, arriving, false)], { total, hold: 3.28 })); // these wait at the door
  }
  groups.push(make(1.72, 2, [[shown, toExperts, ofRoute]], { rest: 3 }));
  groups.push(make(3, 3.28, [[shown, fromExperts, ofRoute]]));
  if (hops || data.shape === "no_dp_ep") {
    groups.push(make(3.28, 3.62, [copies(home, 0, door, half)]), make(3.62, 4, [stayers(door, tile), copies(home, 1, half, tile)]));
  } else {
    const total = stay.length + home.length;
    groups.push(make(3.28, 4, [stayers(door, tile), copies(home, 0, arriving, tile)], { total }));
    groups.push(make(3.28, 4, [copies(home, 0, arriving, tile, false)], { total }));
  }
  return groups.filter((one) => one.n > 0);
}

// How many of the rows into each rank have arrived at time t, as shares 0..1: `groups` are those of one direction.
function arrivals({ begin, end, groups }, t, share, all) {
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
  const passed = (t - begin) / (end - begin); // for rows that are counted, not drawn
  for (let rank = 0; rank < share.length; rank++) share[rank] = all[rank] ? share[rank] / all[rank] : passed;
}
