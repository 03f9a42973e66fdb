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
{{- /* In the same pod. */}}
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
{{- if include "polyreme.hasCaBundle" . }}
{{- range list "SSL_CERT_FILE" "AWS_CA_BUNDLE" "PGSSLROOTCERT" "POLYREME_TOPICS_CA_FILE" }}
- {name: {{ . }}, value: {{ include "polyreme.caFile" $ }}}
{{- end }}
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

{{/* Not empty where the values name certificates of authorities. */}}
{{- define "polyreme.hasCaBundle" -}}
{{- with .Values.caBundle }}{{ if or .pem .existingConfigMap .existingSecret }}true{{ end }}{{ end }}
{{- end }}

{{- define "polyreme.caFile" }}/etc/polyreme/ca/ca.crt{{ end }}

{{/* Volumes of a pod beside its own: those of the settings, and the certificates: polyreme.volumes (list $ $settings) */}}
{{- define "polyreme.volumes" -}}
{{- $bundle := (index . 0).Values.caBundle -}}
{{- $items := printf "items: [{key: %s, path: ca.crt}]" $bundle.key -}}
{{- if $bundle.existingSecret }}
- name: ca-bundle
  secret: {secretName: {{ $bundle.existingSecret }}, {{ $items }}}
{{- else if include "polyreme.hasCaBundle" (index . 0) }}
- name: ca-bundle
  configMap: {name: {{ $bundle.existingConfigMap | default "polyreme-ca-bundle" }}, {{ $items }}}
{{- end }}
{{- with (index . 1).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Their mounts: polyreme.volumeMounts (list $ $settings) */}}
{{- define "polyreme.volumeMounts" -}}
{{- if include "polyreme.hasCaBundle" (index . 0) }}
- {name: ca-bundle, mountPath: {{ include "polyreme.caFile" . | dir }}, readOnly: true}
{{- end }}
{{- with (index . 1).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/*
Variables by which HTTP clients find the proxy, one NAME=VALUE a line; empty: there is none. The API server, Services and this
machine are reached without it.
*/}}
{{- define "polyreme.proxyVariables" -}}
{{- $direct := list "localhost" "127.0.0.1" "::1" ".svc" ".cluster.local" "$(KUBERNETES_SERVICE_HOST)" -}}
{{- with .Values.proxy -}}
{{- if or .httpProxy .httpsProxy -}}
{{- with .httpProxy }}HTTP_PROXY={{ . }}{{ "\n" }}{{ end -}}
{{- with .httpsProxy }}HTTPS_PROXY={{ . }}{{ "\n" }}{{ end -}}
NO_PROXY={{ join "," (concat $direct .noProxy) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The same as a list of variables. */}}
{{- define "polyreme.proxyEnvironment" -}}
{{- range compact (splitList "\n" (include "polyreme.proxyVariables" .)) }}
{{- $pair := splitn "=" 2 . }}
- {name: {{ $pair._0 }}, value: {{ $pair._1 | quote }}}
{{- end }}
{{- end }}

{{/* Port of a URL, or the usual one: polyreme.port (list "https://s3.example" 443) */}}
{{- define "polyreme.port" -}}
{{- $host := regexReplaceAll "[/?#].*$" (regexReplaceAll "^[a-z0-9+]+://" (index . 0) "") "" -}}
{{- trimPrefix ":" (regexFind ":[0-9]+$" $host) | default (index . 1) }}
{{- end }}

{{/*
Ports of the database's URL with commas between, as SQLAlchemy and libpq read it: hosts and ports may be in the query, where `host=a:5433&host=b`
and `host=a,b&port=5433,5434` name two; every port is one that a client may call.
*/}}
{{- define "polyreme.databasePorts" -}}
{{- $usual := "5432" -}}
{{- $url := .Values.database.url | replace "%3A" ":" | replace "%3a" ":" | replace "%2C" "," | replace "%2c" "," -}}
{{- $query := regexFind "[?][^#]*" $url -}}
{{- $authority := regexReplaceAll "^.*@" (regexReplaceAll "[/?#].*$" (regexReplaceAll "^[a-z0-9+]+://" $url "") "") "" -}}
{{- $hosts := list -}}
{{- range regexFindAll "[?&]host=[^&]*" $query -1 }}{{ $hosts = concat $hosts (splitList "," (regexReplaceAll "^.host=" . "")) }}{{ end -}}
{{- $ports := list -}}
{{- range regexFindAll "[?&]port=[^&]*" $query -1 }}{{ $ports = concat $ports (splitList "," (regexReplaceAll "^.port=" . "")) }}{{ end -}}
{{- if not $ports -}}
{{- range $hosts | default (splitList "," $authority) -}}
{{- $ports = append $ports (trimPrefix ":" (regexFind ":[0-9]+$" (regexFind "^([a-zA-Z0-9._-]*|\\[[^]]*\\]):[0-9]+$" .))) -}}
{{- end -}}
{{- if and $hosts (not (compact $ports)) }}{{ $ports = list (trimPrefix ":" (regexFind ":[0-9]+$" $authority)) }}{{ end -}}
{{- end -}}
{{- $named := list -}}
{{- range $ports }}{{ $named = append $named (. | default $usual) }}{{ end -}}
{{- join "," (uniq $named) }}
{{- end }}
