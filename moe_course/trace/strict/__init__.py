"""What a trace and its `run.json` must hold before anything is believed of them: fields, files, and what follows from
what. Every check names file, field or column, entry, both values. Built in: notebook 13."""
