// Where everything stands, worked out once for a pass and a width.

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
  const label = narrow ? 60 : 94;
  const load = narrow ? 92 : 128;
  const room = width - label - load;
  const g = {
    R, lane, top, label, narrow, width, height: top + lane * R + 2,
    tokensAt: label, tokensWidth: room * 0.35, router: label + room * 0.35 + (narrow ? 24 : 40),
    inbox: label + room * 0.69, expertsAt: label + room * 0.69 + 12, expertsWidth: room * 0.31 - 20,
    line: Math.min(16, lane / 3.4), // between the lines of text of a lane
    spread: narrow ? 14 : 32, // dots that wait at the router or at a door stand in a field this wide
    loadAt: width - load, loadWidth: load - 8, tokens: [], experts: [], grids: [],
    laneTop: (rank) => top + lane * rank,
  };
  const lengths = model.tokens.map((token) => token.text.length).sort((a, b) => a - b);
  const typical = Math.min(7, Math.max(1, lengths[Math.floor(lengths.length * 0.8)] ?? 1));
  const ratio = Math.max(0.86, (0.62 * typical + 0.35) * 0.72);
  const mostTokens = Math.max(1, ...model.tokensOf.map((list) => list.length));
  g.continuing = mostTokens <= 2; // a step of decoding: the text so far, then the token
  g.tokenTile = fitTiles(mostTokens, g.tokensWidth - 4, lane - 14, ratio, 26);
  model.tokensOf.forEach((list, rank) => list.forEach((token, i) => {
    const { columns, w, h, gap } = g.tokenTile;
    if (g.continuing) {
      g.tokens[token] = { x: g.tokensAt + g.tokensWidth - w - 6, y: g.laneTop(rank) + (lane * (i + 1)) / (list.length + 1) - h / 2, i, of: list.length };
      return;
    }
    g.tokens[token] = { x: g.tokensAt + (i % columns) * (w + gap), y: g.laneTop(rank) + 7 + Math.floor(i / columns) * (h + gap), i, of: list.length };
  }));
  const held = Array.from({ length: R }, () => []);
  data.owner.forEach((rank, expert) => held[rank].push(expert));
  g.held = held;
  g.expertTile = fitTiles(Math.max(...held.map((list) => list.length)), g.expertsWidth, lane - 34, 1, 28); // the numbers of chosen experts stand above and below
  held.forEach((list, rank) => {
    const { columns, w, h, gap } = g.expertTile;
    const lines = Math.ceil(list.length / columns);
    const up = (lane - lines * (h + gap)) / 2;
    g.grids[rank] = { top: g.laneTop(rank) + up, bottom: g.laneTop(rank) + up + lines * (h + gap) - gap };
    list.forEach((expert, i) => {
      g.experts[expert] = { x: g.expertsAt + (i % columns) * (w + gap), y: g.laneTop(rank) + up + Math.floor(i / columns) * (h + gap) };
    });
  });
  return g;
}

const FAR = [0, 0, 0.5, 1, 0.5, 0]; // how far to the right each phase happens, where not all is in sight

const golden = (n) => (n * 0.6180339887) % 1; // the golden ratio spreads evenly, whatever the order

// Points on the way: the right edge of a token's tile, its place at the router (one per k), a rank's door, an expert's
// tile. Dots that wait stand side by side; those of a chosen token stand apart from them, on the line.
const points = {
  token: (g, token) => [g.tokens[token].x + g.tokenTile.w - 2, g.tokens[token].y + g.tokenTile.h / 2],
  port: (g, model, token, k) => {
    const { i, of } = g.tokens[token];
    const share = (k + 0.5) / model.mostK;
    const aside = g.chosen[token] ? (k % 2) * 14 : 4 + golden(token * model.mostK + k) * g.spread;
    return [g.router - aside, g.laneTop(model.tokens[token].rank) + 9 + (g.chosen[token] ? share : (i + share) / of) * (g.lane - 18)];
  },
  door: (g, model, token, rank, k = 0) => {
    const aside = g.chosen[token] ? 0 : 5 + golden(token + 5 * k) * g.spread;
    return [g.inbox - aside, g.laneTop(rank) + 10 + ((token + 0.5) / model.tokens.length) * (g.lane - 20)];
  },
  half: (g, model, token, rank) => [(g.router + g.inbox) / 2, points.door(g, model, token, rank)[1]],
  expert: (g, expert) => [g.experts[expert].x + g.expertTile.w / 2, g.experts[expert].y + g.expertTile.h / 2],
};
