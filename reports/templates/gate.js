"use strict";
// Filters, the detail drawer and copy buttons; the page is complete without them.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const drawer = document.getElementById("drawer");
  const cells = all("a.cell:not(.gap)").map(link => {
    const card = document.getElementById(link.hash.slice(1)).closest(".card");
    return {link, card, text: card.querySelector(".head").textContent.concat(" ", card.querySelector(".message")?.textContent ?? "").toLowerCase()};
  });

  const find = document.getElementById("find"), family = document.getElementById("family"), shown = document.getElementById("shown");
  const chips = all(".chip");
  const filter = () => {
    const outcomes = new Set(chips.filter(chip => chip.ariaPressed === "true").map(chip => chip.dataset.outcome));
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const {link, card, text} of cells) {
      const keep = (!outcomes.size || outcomes.has(card.dataset.outcome)) && (!family?.value || card.dataset.family === family.value)
        && words.every(word => text.includes(word));
      link.classList.toggle("off", !keep);
      card.hidden = !keep;
      count += keep;
    }
    for (const row of all(".matrix tbody tr")) row.hidden = !row.querySelector("a.cell:not(.off, .gap)");
    shown.value = count === cells.length ? "" : `${count} of ${cells.length} cells`;
  };
  for (const chip of chips) chip.addEventListener("click", () => { chip.ariaPressed = String(chip.ariaPressed !== "true"); filter(); });
  find?.addEventListener("input", filter);
  family?.addEventListener("change", filter);
  for (const filters of all(".filters")) filters.hidden = false;
  if (navigator.clipboard) for (const button of all(".copy")) button.hidden = false;

  document.addEventListener("click", async event => {
    const button = event.target.closest(".copy");
    if (button) {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
      return;
    }
    const link = event.target.closest('a[href^="#c"]:not(nav a)');
    if (event.target === drawer) drawer.close();
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const card = document.getElementById(link.hash.slice(1))?.closest(".card");
    if (!card) return;
    event.preventDefault();
    const copy = card.cloneNode(true);
    copy.hidden = false;
    copy.removeAttribute("id");
    for (const element of [copy, ...all("details", copy)]) element.open = true;
    for (const element of all("[id]", copy)) element.removeAttribute("id");
    drawer.lastElementChild.replaceChildren(copy);
    drawer.setAttribute("aria-label", link.getAttribute("aria-label") ?? copy.querySelector(".head").textContent);
    drawer.showModal();
    drawer.scrollTop = 0;
  });

  const reveal = () => {
    const card = location.hash.startsWith("#c") && document.getElementById(location.hash.slice(1))?.closest(".card");
    if (card) { card.open = true; card.scrollIntoView(); }
  };
  addEventListener("hashchange", reveal);
  reveal();
})();
