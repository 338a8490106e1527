// Formulas are rendered when a page opens; the source of one that fails stays and is marked.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent.trim();
    const display = source.startsWith("\\[");
    katex.render(source.slice(2, -2), element, { displayMode: display, throwOnError: false, errorColor: "#c00" });
  }
});
