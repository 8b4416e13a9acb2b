// The tokens, drawn once for each choice: as they wait, and with what came home. They lie over all that moves.

const shortText = (text, most) => (text.startsWith("·") && text.length > most ? "·" : shortened(text, Math.max(2, most)));

// In a step of decoding: the end of the text that the token continues.
function drawTextsSoFar(context, data, model, g, colours) {
  context.textAlign = "right";
  context.fillStyle = colours.muted;
  context.font = '12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
  const most = Math.floor((g.tokensWidth - g.tokenTile.w - 16) / 7.3);
  model.tokens.forEach((token, i) => {
    const text = textBefore(data, token);
    const characters = [...text];
    context.fillText(characters.length > most ? `…${characters.slice(1 - most).join("")}` : text, g.tokens[i].x - 5, g.tokens[i].y + g.tokenTile.h / 2);
  });
}

const PALE = 0.22; // parts that a choice leaves out: the row is their sum, too

// All tokens on a canvas of their own; `strips` adds below each the ranks whose parts its new row was summed from.
function tokenSheet({ model, g, colours, chosen, chosenMark, visible }, strips) {
  const canvas = h("canvas");
  const context = crisp(canvas, g.width, g.height);
  const { w, h: high } = g.tokenTile;
  const strip = strips ? Math.max(2, Math.round(high * 0.36)) : 0;
  const size = Math.min(high * 0.8, 15, strips ? (high - strip) * 0.95 : 15);
  const fits = Math.max(2, Math.floor(w / (size * 0.6)));
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `${size}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace`;
  model.tokens.forEach((token, i) => {
    const { x, y } = g.tokens[i];
    const picked = chosenMark[i] === 1;
    const parts = model.partsOf[i];
    const faint = !parts.some(visible) || (chosen.length > 0 && !picked);
    context.fillStyle = high >= 7 ? colours.background : rankColour(token.rank); // too small for a text: a dot
    context.globalAlpha = high >= 7 || !faint ? 1 : 0.4;
    context.fillRect(x, y, w, high);
    context.globalAlpha = faint ? 0.55 : 1;
    if (strips) {
      [...parts].sort((a, b) => model.owner[a] - model.owner[b]).forEach((part, at) => {
        context.globalAlpha = !visible(part) ? PALE : faint ? 0.55 : 1;
        context.fillStyle = rankColour(model.owner[part]);
        context.fillRect(x + (w * at) / parts.length, y + high - strip, w / parts.length + (visible(part) ? 0.2 : 0), strip);
      });
    }
    if (high < 7) return;
    context.strokeStyle = picked ? colours.text : rankColour(token.rank);
    context.lineWidth = picked ? 2.5 : 1;
    context.strokeRect(x + 0.5, y + 0.5, w - 1, high - 1);
    if (size < 6) return;
    context.globalAlpha = faint ? 0.65 : 1;
    context.fillStyle = colours.text;
    context.fillText(shortText(token.text, fits), x + w / 2, y + (high - strip) / 2 + 0.5, w - 2);
  });
  return canvas;
}
