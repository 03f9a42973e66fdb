// Pins the promtool that tools/cluster builds: it checks the chart's alerting rules and runs their unit tests.
module polyreme.dev/tools/cluster/promtool

go 1.26.7

require github.com/prometheus/prometheus v0.316.0
