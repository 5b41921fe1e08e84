// How the search weighs what it finds: decision records are about much, so that they would come first; they come last.
// The numbers are those of Sphinx's own searchtools.js.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => (docname.startsWith("decisions/") ? score - 1000 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
