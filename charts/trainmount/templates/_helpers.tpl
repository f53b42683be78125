{{/* Prefix of the names of all objects. */}}
{{- define "trainmount.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of all objects; takes the root context and a component. */}}
{{- define "trainmount.labels" -}}
{{ include "trainmount.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels by which a component's pods are found. Mount pods carry none of the instance. */}}
{{- define "trainmount.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "trainmount.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "trainmount.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the operator may do in each namespace it serves. One line says what each verb is for. */}}
{{- define "trainmount.operatorRules" -}}
# Jobs of people: watched; deleted when their time to live is over.
- apiGroups: [trainmount.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [trainmount.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
# Children block the deletion of their owner.
- apiGroups: [trainmount.dev]
  resources: [trainingjobs/finalizers]
  verbs: [update]
# One Job an attempt; suspended when the attempt ended.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create, get, list, watch, patch, delete]
# Pods are the Job controller's; those of an ended attempt are told to end, or deleted.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [create, get, delete, deletecollection]
# Published on jobs; read for pods that do not start.
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
{{- end -}}
