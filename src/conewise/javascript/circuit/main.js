// The page of a circuit: its picture, the slider of its threshold, the curve of its faithfulness, its table.
import { startTheme } from "../page/theme.js";
import { startAbout } from "./about.js";
import { startCurve } from "./curve.js";
import { startPicture } from "./picture.js";
import { set } from "./state.js";
import { startTable } from "./table.js";
import { startThreshold } from "./threshold.js";

startTheme();
startPicture();
startAbout();
startThreshold();
startCurve();
startTable();
set({});
document.documentElement.dataset.ready = "true";
