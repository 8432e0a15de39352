(() => {
  "use strict";
  const field = document.getElementById("filter"), rows = [...document.querySelectorAll(".runs tbody tr")];
  const count = document.getElementById("count");
  if (!field) return;
  field.closest("p").hidden = false;

  function filter() {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = shown < rows.length ? `${shown} of ${rows.length}` : "";
  }
  field.addEventListener("input", filter);
  filter();  // The browser may have kept a text.
})();
