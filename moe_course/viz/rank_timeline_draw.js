// Part of rank_timeline.js: lanes, bars and axis on a canvas. A stage has a colour (none of a rank), a height and a letter.

const LOOKS = {
  route: ["#a0522d", 0.5],
  dispatch: ["#117a6b", 0.8],
  experts: ["#e0a800", 1.0],
  combine: ["#9a83dd", 0.8],
  other: ["#8a8a8a", 0.25],
};
const tiny = (bold) => (bold ? "bold " : "") + FONT.replace("13px", "11px");

function hatch(pen, colour, background) {
  const tile = h("canvas", { width: 6, height: 6 });
  const brush = tile.getContext("2d");
  brush.fillStyle = background;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = colour;
  brush.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) {
    brush.beginPath();
    brush.moveTo(shift - 1, 7);
    brush.lineTo(shift + 7, -1);
    brush.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

// A bar of a stage with the part that was waiting hatched; a name or a letter where there is room.
function drawBar(pen, name, box, waited, inks, colours) {
  const [colour, tall] = [LOOKS[name][0], LOOKS[name][1] * box.lane];
  const top = box.y - tall / 2;
  pen.fillStyle = colour;
  pen.fillRect(box.x, top, Math.max(box.wide, 0.6), tall);
  if (waited > 0.5) {
    pen.fillStyle = inks[name];
    pen.fillRect(box.x, top, waited, tall);
  }
  if (box.wide > 4) {
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.strokeRect(box.x + 0.5, top + 0.5, box.wide - 1, tall - 1);
  }
  const room = box.wide - waited;
  if (name === "other" || tall < 8 || room < 13) return;
  pen.textAlign = "center";
  pen.fillStyle = name === "route" || name === "dispatch" ? "#ffffff" : "#000000";
  pen.fillText(room > 62 ? name : name[0].toUpperCase(), box.x + waited + room / 2, box.y + 0.5);
}

// Where the passes lie in the run, the shown one framed. Returns what was drawn, for the pointer.
function drawPasses(pen, data, bounds, at, step, colours) {
  const [from, to] = bounds.run;
  const scale = at.wide / (to - from);
  const ends = new Map(data.passes.map((pass, number) => [pass.step, bounds.passes[number]]));
  const inOrder = [...data.passes].sort((a, b) => (a.step === step) - (b.step === step)); // the frame on top
  return inOrder.map((pass) => {
    const [begin, end] = ends.get(pass.step);
    const box = { step: pass.step, x: at.left + (begin - from) * scale, wide: (end - begin) * scale };
    pen.fillStyle = colours.panel;
    pen.fillRect(box.x + 0.5, 2, Math.max(box.wide - 1, 1), 16);
    pen.strokeStyle = pass.step === step ? colours.accent : colours.line;
    pen.lineWidth = pass.step === step ? 2 : 1;
    pen.strokeRect(box.x + 1, 2.5, Math.max(box.wide - 2, 1), 15);
    pen.fillStyle = pass.step === step ? colours.accent : colours.text;
    pen.font = tiny(pass.step === step);
    pen.textAlign = "center";
    const next = ends.get(pass.step + 1)?.[0] ?? end; // passes overlap: a rank is done before another one
    const room = Math.min(box.wide, (next - begin) * scale);
    const words = [`${pass.step} ${pass.phase}`, `${pass.step}`].find((text) => pen.measureText(text).width < room - 4);
    if (words) pen.fillText(words, box.x + room / 2, 10.5);
    return box;
  });
}

// The lanes of all ranks between two times. Returns the boxes of the spans, for the pointer.
function drawLanes(pen, view, at, colours) {
  const { data, indices, shown: [from, to], selected } = view;
  const spans = data.spans;
  const scale = at.wide / (to - from);
  const inks = Object.fromEntries(data.stages.map((name) => [name, hatch(pen, LOOKS[name][0], colours.background)]));
  const middle = (rank) => at.top + (rank + 0.5) * at.row;
  const boxes = [];
  const ticks = tickStep(to - from, Math.max(2, at.wide / 65));
  const bottom = at.top + data.ranks * at.row;
  pen.font = tiny(false);
  pen.textAlign = "center";
  for (let time = Math.ceil((from - at.origin) / ticks) * ticks; time <= to - at.origin; time += ticks) {
    const x = at.left + (time + at.origin - from) * scale;
    pen.fillStyle = colours.line;
    pen.fillRect(x, at.top, 1, bottom - at.top);
    pen.fillStyle = colours.muted;
    const digits = Math.max(0, -Math.floor(Math.log10(ticks / 1e6) + 1e-9));
    pen.fillText((time / 1e6).toFixed(digits), Math.min(x, at.left + at.wide - 12), bottom + 10);
  }
  for (let rank = 0; rank < data.ranks; rank++) {
    pen.textAlign = "right";
    pen.fillStyle = rank === view.rank ? colours.accent : colours.text;
    pen.font = tiny(rank === view.rank);
    pen.fillText(`rank ${rank}`, at.left - 8, middle(rank));
  }
  pen.textAlign = "left";
  pen.fillStyle = colours.muted;
  pen.font = tiny(false);
  pen.fillText("ms", 8, bottom + 10);
  pen.save();
  pen.beginPath();
  pen.rect(at.left, at.top, at.wide, bottom - at.top);
  pen.clip();
  for (const i of indices) {
    const x = at.left + (spans.begin[i] - from) * scale;
    const box = { i, x, wide: spans.time[i] * scale, y: middle(spans.rank[i]), lane: at.row * 0.8 };
    if (x > at.left + at.wide || x + box.wide < at.left) continue;
    drawBar(pen, data.stages[spans.stage[i]], box, spans.wait[i] * scale, inks, colours);
    boxes.push(box);
  }
  for (const box of boxes) {
    const twin = ["step", "layer", "stage"].every((name) => spans[name][box.i] === spans[name][selected]);
    if (box.i !== selected && (!twin || spans.layer[selected] < 0)) continue;
    pen.strokeStyle = colours.text;
    pen.lineWidth = box.i === selected ? 3 : 1;
    pen.strokeRect(box.x - 1, box.y - at.row * 0.45, Math.max(box.wide, 1) + 2, at.row * 0.9);
  }
  pen.restore();
  return boxes;
}
