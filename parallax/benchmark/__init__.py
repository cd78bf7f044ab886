"""Measuring methods against plain decoding: `settings` and `folder` hold a benchmark, `engine` and `measure` make its
records, `numbers` defines what they mean, `tables`, `plots` and `page` show it, `command` runs all of that."""
