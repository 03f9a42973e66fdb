{{/* Image of one of our programs: polyreme.image (list $ "operator") */}}
{{- define "polyreme.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}polyreme/{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{/* Labels of an object: polyreme.labels (list $ "polyreme-operator") */}}
{{- define "polyreme.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/part-of: polyreme
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
{{- end }}

{{- define "polyreme.metadata" -}}
name: {{ index . 1 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "polyreme.labels" . | nindent 2 }}
{{- end }}

{{/* Metadata of a pod template: polyreme.podMetadata (list $ "polyreme-operator" .Values.operator) */}}
{{- define "polyreme.podMetadata" -}}
{{- $values := index . 2 -}}
labels:
  {{- include "polyreme.labels" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the spec of each pod holds: polyreme.podSpec (list $ "polyreme-operator" .Values.operator) */}}
{{- define "polyreme.podSpec" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: 30
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Spread replicas over nodes and zones: polyreme.spread "polyreme-operator" */}}
{{- define "polyreme.spread" -}}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {app.kubernetes.io/name: {{ $ }}}
  {{- end }}
{{- end }}

{{- define "polyreme.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
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

{{/* A variable from a Secret: polyreme.secretVariable (list "PGUSER" "secret" "PGUSER") */}}
{{- define "polyreme.secretVariable" -}}
- name: {{ index . 0 }}
  valueFrom: {secretKeyRef: {name: {{ index . 1 }}, key: {{ index . 2 }}}}
{{- end }}

{{/* Variables of every process of the datahub: the registry, the topics, the object store. */}}
{{- define "polyreme.storeVariables" -}}
- {name: POLYREME_HOME, value: /var/lib/polyreme}
- {name: POLYREME_OBJECTS_URL, value: {{ include "polyreme.objectsUrl" . | quote }}}
- {name: AWS_REGION, value: {{ .Values.objectStore.region | quote }}}
{{- if eq .Values.profile "development" }}
# In the same pod.
- {name: AWS_ENDPOINT_URL, value: "http://127.0.0.1:7070"}
{{- else }}
{{- with .Values.objectStore.endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
{{- end }}
- {name: POLYREME_DATABASE_URL, value: {{ .Values.database.url | quote }}}
{{- with .Values.database.existingSecret }}
{{ include "polyreme.secretVariable" (list "PGUSER" . "PGUSER") }}
{{ include "polyreme.secretVariable" (list "PGPASSWORD" . "PGPASSWORD") }}
{{- end }}
{{- with .Values.topics.url }}
- {name: POLYREME_TOPICS_URL, value: {{ . | quote }}}
{{- end }}
{{- with .Values.topics.existingSecret }}
{{ include "polyreme.secretVariable" (list "POLYREME_TOPICS_TOKEN" . "POLYREME_TOPICS_TOKEN") }}
{{- end }}
{{- end }}
{{- with include "polyreme.objectsSecret" . }}
{{ include "polyreme.secretVariable" (list "AWS_ACCESS_KEY_ID" . "AWS_ACCESS_KEY_ID") }}
{{ include "polyreme.secretVariable" (list "AWS_SECRET_ACCESS_KEY" . "AWS_SECRET_ACCESS_KEY") }}
{{- end }}
{{- end }}

{{- define "polyreme.objectsUrl" -}}
{{- if eq .Values.profile "development" }}s3://polyreme{{ else }}{{ trimSuffix "/" .Values.objectStore.url }}{{ end }}
{{- end }}

{{- define "polyreme.objectsEndpoint" -}}
{{- if eq .Values.profile "development" }}http://polyreme-s3.{{ .Release.Namespace }}.svc:7070{{ else }}{{ .Values.objectStore.endpoint }}{{ end }}
{{- end }}

{{/* Secret of the object store in this namespace; empty: none. */}}
{{- define "polyreme.objectsSecret" -}}
{{- if eq .Values.profile "development" }}{{ .Values.bundledS3.existingSecret | default "polyreme-s3" }}{{ else }}{{ .Values.objectStore.existingSecret }}{{ end }}
{{- end }}

{{/* Secret of the object store in jobs' namespaces; empty: none. */}}
{{- define "polyreme.workerSecret" -}}
{{- $usual := ternary "polyreme-object-store" .Values.objectStore.existingSecret (eq .Values.profile "development") -}}
{{- .Values.jobs.workerSecret | default $usual }}
{{- end }}

{{- define "polyreme.devicesPerNode" -}}
{{- if ne (toString .Values.devices.perNode) "auto" }}{{ .Values.devices.perNode }}{{ else }}{{ ternary 4 0 (eq .Values.profile "development") }}{{ end }}
{{- end }}

{{- define "polyreme.claim" -}}
{{- .Values.bundledS3.storage.existingClaim | default "polyreme-datahub" }}
{{- end }}

{{/* Not empty where a cluster answers: helm template and helm lint have none, and every lookup is empty there. */}}
{{- define "polyreme.isConnected" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" }}true{{ end }}
{{- end }}

{{/* Port of a URL, or the usual one: polyreme.port (list "postgresql://db/x" 5432) */}}
{{- define "polyreme.port" -}}
{{- $host := regexReplaceAll "[/?#].*$" (regexReplaceAll "^[a-z0-9+]+://" (index . 0) "") "" -}}
{{- $port := regexFind ":[0-9]+$" (splitList "," $host | first) -}}
{{- trimPrefix ":" $port | default (index . 1) }}
{{- end }}

{{- define "polyreme.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "polyreme.metadata" . | nindent 2 }}
{{- end }}

{{/* Ports of the API server, for a policy; it sees the port behind the kubernetes Service. */}}
{{- define "polyreme.apiServerPorts" -}}
{{- $ports := list 443 6443 }}
{{- range (lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "kubernetes").ports | default list }}
  {{- $ports = append $ports (int .port) }}
{{- end }}
{{- range .Values.networkPolicies.apiServerPorts | default (uniq $ports) }}
- {port: {{ . }}}
{{- end }}
{{- end }}

{{- define "polyreme.fromMetricsReaders" -}}
{{- with .Values.networkPolicies.metricsNamespaces -}}
- from:
    - namespaceSelector:
        matchExpressions:
          - {key: kubernetes.io/metadata.name, operator: In, values: [{{ join ", " . }}]}
  ports: [{port: 8080}]
{{- else -}}
- ports: [{port: 8080}]
{{- end }}
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

{{- define "polyreme.agentVariables" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- with .Values.agent.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
