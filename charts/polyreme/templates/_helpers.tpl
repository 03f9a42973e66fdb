{{- /* What jobs that name no queue find while there is no TrainingQueue default. */ -}}
{{- define "polyreme.missingDefaultQueue" -}}
{{ .Values.queues.default | default (ternary "Refuse" "Unlimited" (eq .Values.profile "production")) }}
{{- end -}}

{{/* Image of one of our programs: polyreme.image (list $ "operator") */}}
{{- define "polyreme.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.global.imageRegistry | default $root.Values.image.registry }}{{ . }}/{{ end }}polyreme/{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{/* Names of the Secrets that images are pulled with, with commas between. */}}
{{- define "polyreme.pullSecrets" -}}
{{- join "," (.Values.global.imagePullSecrets | default .Values.image.pullSecrets) }}
{{- end }}

{{/* Labels of an object; those of ours come before all others: polyreme.labels (list $ "polyreme-operator" (dict more labels)) */}}
{{- define "polyreme.labels" -}}
{{- $root := index . 0 -}}
{{- if not (hasKey $root.Values "caBundle") -}}
{{- fail "these are the values of an earlier chart, which --reuse-values takes with all their defaults: use --reset-then-reuse-values" -}}
{{- end -}}
{{- $labels := dict -}}
{{- range prepend (slice . 2) ($root.Values.global.commonLabels | default dict) -}}
{{- range $name, $value := . }}{{ $_ := set $labels $name $value }}{{ end -}}
{{- end -}}
{{- $_ := set $labels "app.kubernetes.io/name" (index . 1) -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" "polyreme" -}}
{{- $_ := set $labels "app.kubernetes.io/version" $root.Chart.AppVersion -}}
{{ toYaml $labels }}
{{- end }}

{{- define "polyreme.metadata" -}}
name: {{ index . 1 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "polyreme.labels" . | nindent 2 }}
{{- end }}

{{/* Not empty where a cluster answers: helm template and helm lint have none, and every lookup is empty there. */}}
{{- define "polyreme.isConnected" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" }}true{{ end }}
{{- end }}

{{- define "polyreme.claim" -}}
{{- .Values.bundledS3.storage.existingClaim | default "polyreme-datahub" }}
{{- end }}

{{- define "polyreme.devicesPerNode" -}}
{{- if ne (toString .Values.devices.perNode) "auto" }}{{ .Values.devices.perNode }}{{ else }}{{ ternary 4 0 (eq .Values.profile "development") }}{{ end }}
{{- end }}

{{/* Deployments of the datahub's workers, by device, with commas between; empty: there are none. */}}
{{- define "polyreme.workerPools" -}}
{{- if and (eq .Values.profile "production") .Values.datahub.workers.enabled -}}
cpu{{ if gt (int .Values.datahub.workers.gpu.maxReplicas) 0 }},gpu{{ end }}
{{- end }}
{{- end }}

{{/* Name of one of them: polyreme.workersName "gpu" */}}
{{- define "polyreme.workersName" -}}
polyreme-datahub-workers{{ if ne . "cpu" }}-{{ . }}{{ end }}
{{- end }}

{{/* Address families of a Service, where the values name them. */}}
{{- define "polyreme.ipFamilies" -}}
{{- with .Values.services.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.services.ipFamilies }}
ipFamilies: [{{ join ", " . }}]
{{- end }}
{{- end }}

{{/* The Service of a component's metrics: polyreme.metricsService (list $ "polyreme-operator") */}}
{{- define "polyreme.metricsService" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "polyreme.metadata" (list (index . 0) (printf "%s-metrics" (index . 1))) | nindent 2 }}
spec:
  clusterIP: None
  {{- with include "polyreme.ipFamilies" (index . 0) | trim }}{{ . | nindent 2 }}{{ end }}
  selector: {app.kubernetes.io/name: {{ index . 1 }}}
  ports:
    - {name: metrics, port: 8080, targetPort: metrics, protocol: TCP}
{{- end }}

{{/* At most one replica is evicted at a time: polyreme.disruptionBudget (list $ "polyreme-operator") */}}
{{- define "polyreme.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "polyreme.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {app.kubernetes.io/name: {{ index . 1 }}}
{{- end }}
