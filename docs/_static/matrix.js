// A filter above the support matrix, by device and kind. Without it the page shows everything.
document.addEventListener("DOMContentLoaded", () => {
  const parts = [...document.querySelectorAll(".attn-matrix")];
  if (!parts.length) return;
  const kindOf = (part) => [...part.classList].find((c) => c.startsWith("kind-")).slice(5);
  const devicesOf = (row) => row.cells[1].textContent.replace("*", "").split(", ");
  const rowsOf = (part) => [...part.querySelectorAll("tbody tr")];
  const devices = [...new Set(parts.flatMap(rowsOf).flatMap(devicesOf))].filter((d) => d !== "any");

  const form = document.createElement("form");
  form.className = "attn-filter";
  const select = (name, values) => {
    const label = document.createElement("label");
    const list = document.createElement("select");
    for (const value of ["all", ...values]) list.add(new Option(value, value));
    label.append(`${name} `, list);
    form.append(label);
    return list;
  };
  const device = select("Device", devices.sort());
  const kind = select("Kind", parts.map(kindOf));
  const label = document.createElement("label");
  const built = Object.assign(document.createElement("input"), { type: "checkbox" });
  label.append(built, " only what is implemented");
  form.append(label);

  const apply = () => {
    for (const part of parts) {
      for (const row of rowsOf(part)) {
        const here = devicesOf(row);
        row.hidden =
          (device.value !== "all" && !here.includes(device.value) && !here.includes("any")) ||
          (built.checked && row.cells[0].querySelector("em") !== null);
      }
      const shown = rowsOf(part).some((row) => !row.hidden);
      part.closest("section").hidden = !shown || (kind.value !== "all" && kind.value !== kindOf(part));
    }
  };
  form.addEventListener("change", apply);
  parts[0].closest("section").before(form);
});
