{{/*
Settings of a component's pods, as YAML: its own, and those of `global` for what it leaves empty. Maps are merged key by key; lists
of variables and volumes come one after the other.
polyreme.settings (list $ .Values.operator)
*/}}
{{- define "polyreme.settings" -}}
{{- $global := (index . 0).Values.global -}}
{{- $own := index . 1 -}}
{{- $made := dict -}}
{{- range list "affinity" "priorityClassName" "resources" "revisionHistoryLimit" "terminationGracePeriodSeconds" "tolerations" "topologySpreadConstraints" -}}
{{- $_ := set $made . (get $own . | default (get $global .)) -}}
{{- end -}}
{{- range $name := list "nodeSelector" "podAnnotations" "podLabels" "podSecurityContext" "securityContext" -}}
{{- $map := dict -}}
{{- range list $global $own }}{{ range $key, $value := get . $name | default dict }}{{ $_ := set $map $key $value }}{{ end }}{{ end -}}
{{- $_ := set $made $name $map -}}
{{- end -}}
{{- /* The second names are those of 0.1.0. */ -}}
{{- range $name, $before := dict "extraEnv" "env" "extraEnvFrom" "" "extraVolumes" "volumes" "extraVolumeMounts" "volumeMounts" -}}
{{- $_ := set $made $name (concat (get $global $name | default list) (get $own $before | default list) (get $own $name | default list)) -}}
{{- end -}}
{{ toYaml $made }}
{{- end }}

{{/* Metadata of a pod template: polyreme.podMetadata (list $ "polyreme-operator" $settings) */}}
{{- define "polyreme.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $settings := index . 2 -}}
labels:
  {{- include "polyreme.labels" (list $root (index . 1) $settings.podLabels) | nindent 2 }}
{{- $annotations := $settings.podAnnotations -}}
{{- with $root.Values.caBundle.pem }}
{{- /* Clients read it when they start. */ -}}
{{- $annotations = merge (dict "checksum/ca-bundle" (sha256sum .)) $annotations }}
{{- end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The same settings, with replicas on different nodes and in different zones as far as there are any. Only replicas of one ReplicaSet
count, since during a rollout the old ones are still there. Preferred and not required: on one node all start. Zones are no spread
constraint: where a node has no zone label, kube-scheduler would leave it out of all of them.
polyreme.spread (list "polyreme-operator" $settings)
*/}}
{{- define "polyreme.spread" -}}
{{- $selector := dict "matchLabels" (dict "app.kubernetes.io/name" (index . 0)) -}}
{{- $settings := index . 1 -}}
{{- $alike := dict "labelSelector" $selector "matchLabelKeys" (list "pod-template-hash") -}}
{{- $terms := list -}}
{{- range $key, $weight := dict "kubernetes.io/hostname" 100 "topology.kubernetes.io/zone" 50 -}}
{{- $terms = append $terms (dict "weight" $weight "podAffinityTerm" (merge (dict "topologyKey" $key) $alike)) -}}
{{- end -}}
{{- $affinity := $settings.affinity | default dict -}}
{{- if not (hasKey $affinity "podAntiAffinity") -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $terms) -}}
{{- end -}}
{{- $_ := set $settings "affinity" $affinity -}}
{{- if not $settings.topologySpreadConstraints -}}
{{- $constraint := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" -}}
{{- $_ := set $settings "topologySpreadConstraints" (list (merge $constraint $alike)) -}}
{{- end -}}
{{ toYaml $settings }}
{{- end }}

{{/* Where a pod may run, how urgent it is, and how its images are pulled: polyreme.placement (list $ $settings) */}}
{{- define "polyreme.placement" -}}
{{- $settings := index . 1 -}}
{{- with include "polyreme.pullSecrets" (index . 0) }}
imagePullSecrets:
  {{- range splitList "," . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $settings $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
terminationGracePeriodSeconds: {{ $settings.terminationGracePeriodSeconds }}
{{- end }}

{{/* What the spec of each pod holds but the agent's: polyreme.podSpec (list $ $settings) */}}
{{- define "polyreme.podSpec" -}}
{{- include "polyreme.placement" . }}
{{- with (index . 1).podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The security context of a container: polyreme.containerSecurity $settings */}}
{{- define "polyreme.containerSecurity" -}}
{{- with .securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Requests and limits of a container, as text, since that is what is stored: polyreme.resources $settings */}}
{{- define "polyreme.resources" -}}
{{- with .resources }}
resources:
  {{- range $kind, $amounts := . }}
  {{ $kind }}: { {{- range $at, $name := keys $amounts | sortAlpha }}{{ if $at }}, {{ end }}{{ $name }}: {{ get $amounts $name | toString | quote }}{{ end -}} }
  {{- end }}
{{- end }}
{{- end }}

{{/*
Variables of a container; a later one takes the place of an earlier one with its name, since names must differ for server-side apply.
polyreme.environment (list $ $settings (list "variables as YAML" ...))
*/}}
{{- define "polyreme.environment" -}}
{{- $settings := index . 1 -}}
{{- $all := list -}}
{{- range index . 2 }}{{ $all = concat $all (fromYamlArray .) }}{{ end -}}
{{- $names := list -}}
{{- $byName := dict -}}
{{- range concat $all ($settings.extraEnv | default list) -}}
{{- if not (hasKey $byName .name) }}{{ $names = append $names .name }}{{ end -}}
{{- $_ := set $byName .name . -}}
{{- end -}}
{{- with $names }}
env:
  {{- range . }}
  - {{ get $byName . | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- with $settings.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "polyreme.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
