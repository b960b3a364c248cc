// The page of a sweep.
import { startTheme, whenDressed } from "../page/theme.js";
import { drawInside, startInside } from "./inside.js";
import { redrawMaps, startMaps } from "./maps.js";
import { showSite, startSite } from "./site.js";
import { drawSpeeds } from "./speeds.js";
import { drawSpread, startSpread } from "./spread.js";
import { startTable } from "./table.js";
import { startViews } from "./views.js";

function start() {
  startMaps();
  startTable();
  startSite();
  startSpread();
  startInside();
  drawSpeeds();
  startViews();
  whenDressed(() => {
    redrawMaps();
    showSite();
    drawSpread();
    drawInside();
    drawSpeeds();
  });
  document.documentElement.dataset.ready = "true";
}

startTheme();
// The cone's script begins then too, and stands before this one.
if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
else start();
