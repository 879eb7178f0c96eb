//! A subscriber that keeps everything of the crate's: targets, levels, names and fields. An executable that uses it names
//! it as a module of its own.

#![allow(dead_code, reason = "each executable uses a part of it")]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// An event, or a span that began.
#[derive(Clone, Debug)]
pub struct Record {
    pub target: String,
    /// A span's name; none for events.
    pub span: Option<&'static str>,
    pub level: tracing::Level,
    pub fields: BTreeMap<String, String>,
    /// The names of the spans that it is in, the innermost first.
    pub within: Vec<&'static str>,
    /// A span's number, whether any thread was in it, and whether it is over.
    id: u64,
    pub entered: bool,
    pub closed: bool,
}

impl Record {
    pub fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("(none)", String::as_str)
    }

    /// Names of its fields, less an event's text.
    pub fn names(&self) -> Vec<&str> {
        self.fields.keys().map(String::as_str).filter(|name| *name != "message").collect()
    }
}

static ALL: Mutex<Vec<Record>> = Mutex::new(Vec::new());

struct Recorder;

struct Fields<'a>(&'a mut BTreeMap<String, String>);

impl tracing::field::Visit for Fields<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
    fn record_str(&mut self, field: &tracing::field::Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

fn records() -> MutexGuard<'static, Vec<Record>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The record of a span, unless it began before recording did. (Numbers are used again.)
fn change(id: &tracing::Id, change: impl FnOnce(&mut Record)) {
    let mut all = records();
    all.iter_mut().rev().find(|record| record.span.is_some() && record.id == id.into_u64()).map(change);
}

fn keep(
    id: u64,
    metadata: &tracing::Metadata<'_>,
    span: Option<&'static str>,
    within: Vec<&'static str>,
    visit: impl FnOnce(&mut Fields<'_>),
) {
    if !metadata.target().starts_with("pinpool") {
        return;
    }
    let mut fields = BTreeMap::new();
    visit(&mut Fields(&mut fields));
    let (target, level) = (metadata.target().to_owned(), *metadata.level());
    records().push(Record { target, span, level, fields, within, id, entered: false, closed: false });
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        let within =
            context.event_scope(event).map_or_else(Vec::new, |scope| scope.map(|s| s.name()).collect());
        keep(0, event.metadata(), None, within, |fields| event.record(fields));
    }

    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        id: &tracing::Id,
        context: Context<'_, S>,
    ) {
        let within =
            context.span_scope(id).map_or_else(Vec::new, |scope| scope.skip(1).map(|s| s.name()).collect());
        let metadata = attributes.metadata();
        keep(id.into_u64(), metadata, Some(metadata.name()), within, |fields| attributes.record(fields));
    }

    fn on_record(&self, id: &tracing::Id, values: &tracing::span::Record<'_>, _: Context<'_, S>) {
        change(id, |record| values.record(&mut Fields(&mut record.fields)));
    }

    fn on_enter(&self, id: &tracing::Id, _: Context<'_, S>) {
        change(id, |record| record.entered = true);
    }

    fn on_close(&self, id: tracing::Id, _: Context<'_, S>) {
        change(&id, |record| record.closed = true);
    }
}

/// From here on everything is kept. Once in a process, since a process has one subscriber.
pub fn record() {
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Recorder)).unwrap();
}

pub fn clear() {
    records().clear();
}

/// The records so far that `wanted` accepts.
pub fn all(wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
    records().iter().filter(|record| wanted(record)).cloned().collect()
}

pub fn events(target: &str) -> Vec<Record> {
    all(|record| record.span.is_none() && record.target == target)
}

/// The only event of a target, with these fields.
pub fn event(target: &str, level: tracing::Level, fields: &[&str]) -> Record {
    let found = events(target);
    let [event] = &found[..] else { panic!("{} events of {target}: {found:#?}", found.len()) };
    assert_eq!((event.level, event.names()), (level, fields.to_vec()), "{target}");
    event.clone()
}

/// Spans of this target and name.
pub fn spans(target: &str, name: &str) -> Vec<Record> {
    all(|record| record.target == target && record.span == Some(name))
}

/// The first span of this name, with these fields.
pub fn span(target: &str, name: &str, level: tracing::Level, fields: &[&str]) -> Record {
    let found = spans(target, name);
    let Some(span) = found.first() else { panic!("no span {name} of {target}: {:#?}", all(|_| true)) };
    assert_eq!((span.level, span.names()), (level, fields.to_vec()), "{target} {name}");
    span.clone()
}
