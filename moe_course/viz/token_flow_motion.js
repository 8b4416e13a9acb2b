// Drawing what moves, on a canvas of its own. Hardly anything is made for a frame: columns, sheets and texts are ready.

// What moves, at time t, from bottom to top: experts, lines, dots, tokens, and what is chosen.
function drawMoving(context, scene, t) {
  const { groups, chosen, g } = scene;
  const [tokens, experts] = [[g.tokensAt - 4, g.tokensWidth + 8], [g.expertsAt - 4, g.expertsWidth + 8]]; // columns
  context.textBaseline = "middle";
  if (t > 1 && scene.data.capacity) drawFilled(context, scene, Math.min(1, (t - 1) / 0.72));
  drawLoads(context, scene, t);
  if (t > 2) drawSheet(context, scene.sheet("lit"), g, t > 4 ? Math.max(0.3, 1 - (t - 4)) : Math.min(1, 0.25 + 1.5 * (t - 2)), ...experts);
  if (t > 2 && t <= 3) drawSheet(context, scene.sheet("rest"), g, 1, ...experts);
  if (chosen.length && t > 1) drawPaths(context, scene, t > 4 ? Math.max(0.2, 0.75 - (t - 4)) : 0.75);
  for (const part of groups) if (t > part.begin && t <= part.hold) drawGroup(context, scene, part, t);
  drawSheet(context, scene.sheet("tokens"), g, 1, ...tokens);
  if (t > 4) drawSheet(context, scene.sheet("done"), g, Math.min(1, 2 * (t - 4)), ...tokens);
  if (chosen.length && t > 1) drawLabels(context, scene, t > 1.72 && t < 3.28);
  if (chosen.length) for (const part of groups) if (t > part.begin && t <= part.rest) drawBadges(context, scene, part, t);
  if (t > 1) drawArrived(context, scene, t);
}

const eased = (u) => u * u * (3 - 2 * u);

function drawGroup(context, scene, part, t) {
  const { dots, glyphs, chosenMark } = scene;
  const passed = (t - part.begin) / (part.end - part.begin);
  const any = scene.chosen.length > 0;
  const letters = glyphs !== null && part.total <= 700 && part.end - part.begin > 0.3;
  for (let i = 0; i < part.n; i++) {
    const token = part.token[i];
    if (chosenMark[token] === 1) continue;
    const u = Math.min(1, Math.max(0, (passed - part.start[i]) / (1 - STAGGER)));
    const x = part.x0[i] + (part.x1[i] - part.x0[i]) * u;
    const y = part.y0[i] + part.dy[i] * eased(u);
    const rank = (part.look[i] / 3) | 0;
    const kind = part.look[i] % 3;
    const text = letters && u > 0 && u < 1; // what waits is small
    const { canvas, cell, ratio } = text ? dots.large : dots.small;
    context.globalAlpha = !any ? 1 : kind === 2 ? 0.5 : 0.35;
    context.drawImage(canvas, rank * cell * ratio, kind * cell * ratio, cell * ratio, cell * ratio, x - cell / 2, y - cell / 2, cell, cell);
    if (text) {
      const line = (token / glyphs.columns) | 0;
      const ink = kind === 2 ? scene.plainInk : scene.inks[rank];
      context.drawImage(glyphs.canvas, (token % glyphs.columns) * GLYPH * ratio, (ink * glyphs.lines + line) * GLYPH * ratio, GLYPH * ratio, GLYPH * ratio, x - GLYPH / 2, y - GLYPH / 2, GLYPH, GLYPH);
    }
  }
  context.globalAlpha = 1;
}

// The dots of chosen tokens, over everything.
function drawBadges(context, scene, part, t) {
  const { canvas, cell, ratio } = scene.badges;
  const passed = (t - part.begin) / (part.end - part.begin);
  for (const i of part.mine) {
    const u = Math.min(1, Math.max(0, (passed - part.start[i]) / (1 - STAGGER)));
    const x = part.x0[i] + (part.x1[i] - part.x0[i]) * u;
    const y = part.y0[i] + part.dy[i] * eased(u);
    const [rank, kind] = [(part.look[i] / 3) | 0, part.look[i] % 3];
    context.drawImage(canvas, rank * cell * ratio, kind * cell * ratio, cell * ratio, cell * ratio, x - cell / 2, y - cell / 2, cell, cell);
  }
}

// What each rank computes: nothing is known before, numbers grow while its experts compute, then the busiest is named.
function drawLoads(context, scene, t) {
  const { model, g, colours, shownLoad, loadTexts } = scene;
  const done = Math.min(1, Math.max(0, 2 * (t - 2)));
  const most = model.mostLoad || 1;
  context.textAlign = "left";
  context.lineWidth = 1;
  for (let r = 0; r < g.R; r++) {
    const y = g.laneTop(r) + g.lane / 2;
    context.strokeStyle = colours.line;
    context.strokeRect(g.loadAt + 0.5, y - 0.5, g.loadWidth - 1, 11);
    context.fillStyle = rankColour(r);
    context.globalAlpha = 0.25;
    context.fillRect(g.loadAt, y - 1, ((g.loadWidth * model.load[r]) / most) * done, 12);
    context.globalAlpha = 1;
    context.fillRect(g.loadAt, y - 1, ((g.loadWidth * shownLoad[r]) / most) * done, 12);
    context.fillStyle = done ? colours.text : colours.muted;
    context.font = done === 1 && model.load[r] === most ? scene.boldFont : scene.plainFont;
    context.fillText(done === 1 ? loadTexts[r] : done ? scene.numberText(Math.round(shownLoad[r] * done)) : "–", g.loadAt, y - 10, g.loadWidth);
  }
}

// Places of padded buffers that hold a row.
function drawFilled(context, { data, model, g }, share) {
  for (let r = 0; r < g.R; r++) {
    const places = g.held[r].length * data.ranks * data.capacity;
    const full = Math.max(1, ((g.lane - 12) * model.load[r] * share) / places);
    context.fillStyle = rankColour(r);
    context.fillRect(g.inbox - 5, g.laneTop(r) + g.lane - 6 - full, 10, full);
  }
}

// A sheet's columns from `x` on, `wide` pixels.
function drawSheet(context, sheet, g, alpha, x, wide) {
  const ratio = sheet.width / g.width;
  context.globalAlpha = alpha;
  context.drawImage(sheet, x * ratio, 0, wide * ratio, sheet.height, x, 0, wide, g.height);
  context.globalAlpha = 1;
}

// What has come from other ranks, below each rank's name: rows of dispatch, from combine on parts on their way home.
function drawArrived(context, { g, colours, into, arrivedText }, t) {
  const text = arrivedText[t > 3 ? 1 : 0];
  context.font = "bold 11px ui-sans-serif, system-ui, sans-serif";
  context.textAlign = "left";
  context.fillStyle = colours.text;
  for (let r = 0; r < g.R; r++) context.fillText(text(into[r]), 9, g.laneTop(r) + g.lane / 2 + g.line, g.label - 13);
}

// Rows that have arrived by time t: into each rank in `scene.into`, and as [rows there, rows home].
function countArrivals(scene, t) {
  const { counting, into, share, all, totals } = scene;
  for (let leg = 0; leg < 2; leg++) {
    const { begin, end } = counting[leg];
    if (t > begin && t < end) arrivals(counting[leg], t, share, all);
    scene.arrived[leg] = 0;
    for (let r = 0; r < into.length; r++) {
      const rows = t <= begin ? 0 : Math.round(totals[leg].into[r] * (t < end ? share[r] : 1));
      scene.arrived[leg] += rows;
      if (leg === 0 || t > 3) into[r] = rows;
    }
  }
}
