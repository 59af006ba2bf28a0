// Walks through the cards of a page by buttons or arrow keys, and shows those of one group.
(() => {
  const all = selector => [...document.querySelectorAll(selector)];
  all("img[data-of]").forEach(image => { image.src = document.getElementById(image.dataset.of).src; });
  const nav = document.querySelector("nav");
  if (!nav) return;
  const pick = nav.querySelector("select"), place = nav.querySelector("output"), cards = all("[data-group]");
  const shown = () => cards.filter(card => !card.hidden);
  const distance = card => card.getBoundingClientRect().top - nav.offsetHeight - 14;
  const current = visible => visible.findLastIndex(card => distance(card) <= 1);
  const tell = () => {
    const visible = shown();
    place.textContent = visible.length ? `${Math.max(current(visible), 0) + 1} of ${visible.length}` : "none";
  };
  const walk = step => {
    const visible = shown(), to = Math.min(Math.max(current(visible) + step, 0), visible.length - 1);
    if (visible.length) window.scrollBy(0, distance(visible[to]));
    tell();
  };
  pick.onchange = () => {
    cards.forEach(card => { card.hidden = pick.value !== "" && card.dataset.group !== pick.value; });
    tell();
  };
  all("nav button").forEach(button => { button.onclick = () => walk(Number(button.value)); });
  all("nav input").forEach(box => {
    box.onchange = () => document.body.classList.toggle(box.value, box.checked !== box.defaultChecked);
  });
  document.onkeydown = event => {
    if (event.target === pick || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowRight" || event.key === "j") walk(1);
    if (event.key === "ArrowLeft" || event.key === "k") walk(-1);
  };
  document.onscroll = tell;
  tell();
})();
