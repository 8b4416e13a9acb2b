// Part of score_grid.js: what is on its two canvases. `view` is {data, state, chosen, before, low, high}; `at` says where.

const small = (size, bold) => (bold ? "bold " : "") + FONT.replace("13px", `${size}px`);

function drawToken(pen, view, t, x, y, colours) {
  pen.textAlign = "right";
  pen.font = (t === view.state.token ? "bold " : "") + MONO;
  pen.fillStyle = t === view.state.token ? colours.accent : colours.text;
  pen.fillText(isolated(fitted(view.data.tokens[t], 11)), x, y);
}

// One line of experts: numbers and groups on top, a row of tiles per token.
function drawPanel(pen, view, at, line, colours) {
  const { data, state } = view;
  const [T, E] = [data.tokens.length, data.scores[0].length];
  const size = E / data.n_group;
  const first = line * at.inLine;
  const end = Math.min(first + at.inLine, E);
  const [x, y] = [(e) => at.label + (e - first) * at.tile, (t) => line * at.panel + at.head + t * at.height];
  const every = at.tile >= 24 ? 1 : at.tile >= 18 ? 2 : 4;
  const here = state.expert >= first && state.expert < end;
  pen.textAlign = "center";
  for (let e = first; e < end; e++) {
    const mine = e === state.expert;
    const crowded = here && Math.abs(e - state.expert) * at.tile < 26;
    pen.fillStyle = mine ? colours.accent : colours.muted;
    pen.font = small(11, mine);
    if (mine || (e % every === 0 && !crowded)) pen.fillText(e, x(e) + at.tile / 2, y(0) - 10);
    if (mine) for (const edge of [y(0) - 3, y(T) + 1]) pen.fillRect(x(e), edge, at.tile, 2);
    if (data.n_group === 1 || (e % size !== 0 && e !== first)) continue;
    const last = Math.min((Math.floor(e / size) + 1) * size, end);
    const wide = (last - e) * at.tile;
    pen.fillStyle = colours.muted;
    pen.font = small(11, false);
    pen.fillRect(x(e) + 1, y(0) - 19, wide - 3, 1);
    if (wide > 16) pen.fillText(`${wide > 60 ? "group " : ""}${Math.floor(e / size)}`, x(e) + wide / 2, y(0) - 26);
    pen.fillStyle = colours.text;
    if (e > first) pen.fillRect(x(e) - 0.75, y(0), 1.5, T * at.height);
  }
  for (let t = 0; t < T; t++) {
    drawToken(pen, view, t, at.label - 7, y(t) + at.height / 2, colours);
    for (let e = first; e < end; e++) drawTile(pen, view, t, e, x(e), y(t), at, colours);
  }
}

function drawTile(pen, view, t, e, x, y, at, colours) {
  const { data, chosen, before, low, high } = view;
  const { ids, choice, kept } = chosen[t];
  const [wide, tall, place] = [at.tile - 2, at.height - 2, ids.indexOf(e)];
  const dropped = data.n_group > 1 && !kept.includes(Math.floor(e / (choice.length / data.n_group)));
  const [red, green, blue] = cividis((choice[e] - low) / (high - low || 1));
  const paper = dropped ? colours.muted : red * 0.299 + green * 0.587 + blue * 0.114 > 125 ? "#000000" : "#ffffff";
  pen.fillStyle = dropped ? colours.panel : `rgb(${red},${green},${blue})`;
  pen.fillRect(x + 1, y + 1, wide, tall);
  if (dropped) {
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x + 2, y + tall);
    pen.lineTo(x + wide, y + 2);
    pen.stroke();
  }
  const was = before ? before[t].ids.includes(e) : place >= 0;
  if (place >= 0) {
    pen.strokeStyle = colours.text;
    pen.lineWidth = 2;
    pen.strokeRect(x + 1, y + 1, wide, tall);
    pen.lineWidth = 1.5;
    pen.strokeStyle = paper;
    if (!was) pen.strokeRect(x + 3.25, y + 3.25, wide - 4.5, tall - 4.5);
    pen.fillStyle = paper;
    pen.textAlign = "center";
    pen.font = small(at.tile < 17 ? 10 : 12, true);
    pen.fillText(place + 1, x + (at.tile > 44 ? 11 : at.tile / 2), y + at.height / 2 + 0.5);
  } else if (was) {
    pen.strokeStyle = paper;
    pen.setLineDash([3, 2]);
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 2, y + 2, wide - 2, tall - 2);
    pen.setLineDash([]);
  }
  if (at.tile <= 44) return;
  pen.textAlign = "right";
  pen.fillStyle = paper;
  pen.font = small(11, false);
  const score = place >= 0 && at.tile < 60 ? choice[e].toFixed(2) : shown(choice[e]).slice(0, 5); // beside its number
  pen.fillText(score, x + wide - 3, y + at.height / 2 + 0.5);
}

// A bar per token, as long as its weights add up to, a piece per chosen expert.
function drawWeights(pen, view, at, width, widest, colours) {
  const room = width - at.label - 62;
  view.chosen.forEach((row, t) => {
    const [top, middle] = [t * at.bar + 2, t * at.bar + at.bar / 2];
    let x = at.label;
    drawToken(pen, view, t, at.label - 7, middle, colours);
    row.ids.forEach((e, place) => {
      const long = (row.weights[place] / widest) * room;
      const mine = e === view.state.expert;
      pen.fillStyle = mine ? colours.accent : colours.panel;
      pen.fillRect(x, top, long, at.bar - 4);
      pen.strokeStyle = colours.text;
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, top + 0.5, long - 1, at.bar - 5);
      pen.textAlign = "center";
      pen.font = small(11, mine);
      pen.fillStyle = mine ? colours.background : colours.text;
      const words = [`${e}: ${shown(row.weights[place])}`, `${e}`].find((text) => pen.measureText(text).width < long - 4);
      if (words) pen.fillText(words, x + long / 2, middle + 0.5);
      x += long;
    });
    pen.textAlign = "left";
    pen.font = small(12, true);
    pen.fillStyle = colours.text;
    pen.fillText(`Σ ${total(row.weights).toFixed(3)}`, x + 6, middle + 0.5);
  });
}
