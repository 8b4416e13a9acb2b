// A token chosen in the text is the one that the player follows. Pictures are there once all modules have run.
addEventListener("load", () => {
  const picture = (name) => document.querySelector(`[data-picture="${name}"]`);
  picture("token_text").addEventListener("moe-state", (event) => {
    const player = picture("token_flow");
    player.picture.set(event.detail);
    player.scrollIntoView({ block: "nearest" });
  });
});
