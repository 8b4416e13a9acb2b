// What moves in one pass, without any drawing: routes, copies that travel by this backend's rules, loads, counts.

const PHASES = ["at source", "router", "dispatch", "experts", "combine", "done"];
// Time runs from BEGIN to END; a phase ends at 0, 1, 2, 3, 4 and END.
const BEGIN = -0.3;
const END = 5;
const phaseAt = (t) => PHASES[t <= 0 ? 0 : t > 4 ? 5 : Math.ceil(t)];
// Where stepping stops in each phase: the moment that shows it best.
const stopsOf = (data) => (["two_hop", "no_dp_ep"].includes(data.shape) ? [BEGIN, 0.8, 1.57, 2.8, 3.82, END] : [BEGIN, 0.8, 1.45, 2.8, 3.65, END]);

// The slider goes from 0 to 5 over the six tabs: k is the middle of tab k and its stop, k + 0.5 the end of the phase.
const knotsOf = (data) => stopsOf(data).flatMap((stop, k) => (k < 5 ? [stop, k] : [stop]));
function placeOf(data, t) {
  const knots = knotsOf(data);
  const i = Math.min(knots.length - 2, Math.max(0, knots.findIndex((knot) => knot >= t) - 1));
  return (i + (t - knots[i]) / (knots[i + 1] - knots[i])) / 2;
}
function timeAt(data, place) {
  const knots = knotsOf(data);
  const i = Math.min(knots.length - 2, Math.floor(place * 2));
  return knots[i] + (knots[i + 1] - knots[i]) * (place * 2 - i);
}

// One pass in typed arrays. `source[i]` is the rank that route i starts from.
function readPass(data, pass) {
  const { routes, tokens } = pass;
  const n = routes.token.length;
  const found = {
    n, tokens, pass,
    token: Int32Array.from(routes.token), expert: Int32Array.from(routes.expert), owner: Int32Array.from(routes.owner),
    k: Int32Array.from(routes.k), via: Int32Array.from(routes.via), weight: Float32Array.from(routes.weight),
    source: new Int32Array(n), load: new Int32Array(data.ranks), expertLoad: new Int32Array(data.experts),
    routesOf: tokens.map(() => []), tokensOf: Array.from({ length: data.ranks }, () => []), mostK: 1,
  };
  tokens.forEach((token, index) => found.tokensOf[token.rank].push(index));
  for (let i = 0; i < n; i++) {
    found.source[i] = tokens[found.token[i]].rank;
    found.load[found.owner[i]] += 1;
    found.expertLoad[found.expert[i]] += 1;
    found.routesOf[found.token[i]].push(i);
    found.mostK = Math.max(found.mostK, found.k[i] + 1);
  }
  // routes whose outputs are added up to a token's new row: where ranks share their rows, those of all of them
  const parts = new Map();
  found.partsOf = tokens.map(({ prompt, position }, index) => {
    const key = `${prompt}/${position}`;
    if (!parts.has(key)) parts.set(key, []);
    parts.get(key).push(...found.routesOf[index]);
    return parts.get(key);
  });
  found.mostLoad = Math.max(...found.load);
  found.busiest = [...found.load.keys()].filter((rank) => found.load[rank] === found.mostLoad);
  found.mostOfExpert = Math.max(1, ...found.expertLoad);
  return found;
}

// Ranks may share rows: such a token counts once.
const distinctTokens = (tokens) => new Set(tokens.map(({ prompt, position }) => `${prompt}/${position}`)).size;

// Tokens that are the same row on ranks that share their rows: where one is chosen, all are.
function sameToken(tokens, index) {
  const { prompt, position } = tokens[index];
  return tokens.flatMap((token, i) => (token.prompt === prompt && token.position === position ? [i] : []));
}

// What leaves a rank, one entry per row: [token, from, to, used?, hop]. Where all routes are visible the counts are those
// of the ledger; else only rows that carry a visible one are here, and none that carries nothing.
function travelling(data, model, visible) {
  const there = [];
  const home = [];
  const seen = [new Set(), new Set()];
  const once = (token, rank, set = seen[0]) => {
    const key = token * data.ranks + rank;
    return !set.has(key) && Boolean(set.add(key));
  };
  const every = model.expert.every((_, i) => visible(i));
  const each = (f) => {
    for (let i = 0; i < model.n; i++) if (visible(i)) f(model.token[i], model.source[i], model.owner[i], model.via[i], i);
  };
  if (data.shape === "allgather_reducescatter") {
    const peers = peersOf(data, model.pass.wire.dispatch);
    const wanted = new Set();
    const shown = new Set();
    each((token, source, owner) => { wanted.add(token * data.ranks + owner); shown.add(token); });
    for (const token of shown) {
      const source = model.tokens[token].rank;
      for (const peer of peers[source]) {
        const used = wanted.has(token * data.ranks + peer);
        if (!used && !every) continue;
        there.push([token, source, peer, used, 0]);
        home.push([token, peer, source, used, 0]);
      }
    }
  } else if (data.shape === "high_throughput" || data.shape === "one_sided") {
    each((token, source, owner) => {
      if (owner === source || !once(token, owner)) return;
      there.push([token, source, owner, true, 0]);
      home.push([token, owner, source, true, 0]);
    });
  } else if (data.shape === "two_hop") {
    each((token, source, owner, known) => {
      const via = known < 0 ? source : known;
      const first = once(token, via, seen[1]);
      if (first && via !== source) there.push([token, source, via, true, 0]);
      if (!once(token, owner)) return;
      if (owner !== via) {
        there.push([token, via, owner, true, 1]);
        home.push([token, owner, via, true, 0]);
      }
      if (via !== source && (first || !data.reduce_in_node)) home.push([token, via, source, true, 1]);
    });
  } else if (data.shape !== "no_dp_ep") {
    each((token, source, owner) => {
      if (owner === source) return;
      there.push([token, source, owner, true, 0]);
      home.push([token, owner, source, true, 0]);
    });
  } else if (data.reduce) {
    const rows = 1 + Math.max(...model.tokens.map((token) => token.row));
    const shown = new Set();
    each((token) => shown.add(model.tokens[token].row));
    model.tokens.forEach(({ rank, row }, token) => {
      const adder = adderOf(row, rows, data.ranks);
      if (!shown.has(row) || adder === rank) return;
      if (every || model.routesOf[token].some(visible)) home.push([token, rank, adder, true, 0]);
      home.push([token, adder, rank, true, 1]); // the sum has the visible parts of all ranks
    });
  }
  return { there, home };
}

// Ranks that each rank's rows go to, by what travelled.
function peersOf(data, wire) {
  const peers = Array.from({ length: data.ranks }, () => new Set());
  for (const [source, destination] of wire) peers[source].add(destination);
  return peers;
}

// Who adds up a row that all ranks share: an even share each, in rank order, the rest to the first ones.
function adderOf(row, rows, ranks) {
  const base = Math.floor(rows / ranks);
  const rest = rows % ranks;
  const long = rest * (base + 1);
  return row < long ? Math.floor(row / (base + 1)) : rest + Math.floor((row - long) / Math.max(base, 1));
}

// Rows, empty places and bytes of one direction, in all and into each rank.
function wireTotals(data, entries, width) {
  const total = { rows: 0, empty: 0, bytes: 0, emptyBytes: 0, into: new Int32Array(data.ranks) };
  for (const [, destination, rows, empty, bytes] of entries) {
    total.rows += rows;
    total.empty += empty;
    total.bytes += bytes;
    total.emptyBytes += empty * width;
    total.into[destination] += rows;
  }
  return total;
}

const whole = (n) => Math.round(n).toLocaleString("en-US");
function bytesText(n) {
  if (n < 10000) return `${whole(n)} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    n /= 1000;
    if (n < 1000 || unit === "GB") return `${n < 100 ? n.toFixed(1) : whole(n)} ${unit}`;
  }
}
const counted = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;

// What follows a dispatch and its combine where ranks split or share a text's rows. It is counted with combine.
const AFTER = {
  gather: "Counted with combine, not drawn: ranks that split the rows of a text give each other their finished rows.",
  sum: "Counted with combine, not drawn: ranks that share the rows of a text add up their sums.",
};

// What a backend moves, in words.
const TRAVEL = {
  allgather_reducescatter: "every row goes to every other rank; experts there use those they need",
  high_throughput: "one copy of a row for each rank that owns one of its experts; one sum comes home from each",
  one_sided: "one copy of a row, written into the memory of each rank that owns one of its experts; one sum comes home",
  low_latency: "one row for each route, into fixed places of a padded buffer; single outputs come home",
  all_to_all: "one row for each route; single outputs come home",
  two_hop: "one copy of a row for each node, forwarded inside it to the ranks that own the experts; sums come home the same way",
  no_dp_ep: "no row is dispatched: every rank has all rows, and their partial sums are added up at the end",
};
