//! Which files make up a checkpoint: one, those of an index, or those of a folder.
//!
//! An index is JSON whose `weight_map` names the file of each tensor. It comes from outside, so only files right beside
//! the index are opened. [`Index::read`] collects their names. [`Index::choose`] reads the text again when they are
//! open.
//!
//! A folder's index is the one file in it that is named like one ([`is_index`]). A folder without an index must have
//! all files of each numbered set (`model-00002-of-00003`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use super::header::{LONGEST_HEADER, Names, Table, twice};
use super::json::{brackets, entries, inside, is_object, named, text};
use super::{NAME, Shard, blamed, malformed, open_regular, reserved, shown, stand_in, unread};
use pinpool::{Error, Result};

const SUFFIX: &str = "safetensors";
/// The longest name that a file can have (Linux's `NAME_MAX`), in bytes.
const LONGEST_FILE: usize = 255;
/// The most files that an index may name.
const FILES: usize = 10_000;
/// The index's entry that says which tensor is in which file.
const MAP: &str = "weight_map";

/// An index: which tensor is in which file.
pub(super) struct Index {
    /// Its name for errors.
    what: String,
    text: String,
    /// The names of its files, sorted.
    files: Vec<String>,
}

/// The files that a path stands for, and the index that names them.
type Found = (Vec<PathBuf>, Option<Index>);

impl Index {
    /// Leaves of the tensors of its files, which were opened in order, those that it names.
    pub(super) fn choose(&self, shards: &[Shard], tables: &mut [Table], names: &Names) -> Result<()> {
        let (what, mut last, mut number) = (&*self.what, "", 0);
        each_pair(what, &self.text, |tensor, file| {
            if file != last {
                let name = file_name(file).unwrap_or_default();
                (last, number) = (file, self.files.binary_search(&name).unwrap_or_default());
            }
            let name = text(tensor)
                .map_err(|said| blamed(what, &named(tensor), format!("has a wrong name ({said})")))?;
            let mut places = names.get(&name, |(shard, tensor)| tables[shard as usize].name(tensor));
            let Some((_, place)) = places.find(|(shard, _)| *shard as usize == number) else {
                let why = format!(
                    "is said to be in {}, which does not have it; get both again",
                    shards[number].name
                );
                return Err(blamed(what, &name, why));
            };
            drop(places);
            let entry = &mut tables[number].entries[place as usize];
            let again = std::mem::replace(&mut entry.listed, true);
            if again { Err(twice(what, &name)) } else { Ok(()) }
        })?;
        tables.iter_mut().for_each(|table| table.entries.retain(|entry| entry.listed));
        Ok(())
    }

    fn read(path: &Path) -> Result<Found> {
        let what = path.display().to_string();
        let (file, metadata) = open_regular(path, &what)?;
        if metadata.len() > LONGEST_HEADER {
            let why = format!("more than {LONGEST_HEADER} bytes are too many for an index");
            return Err(malformed(&what, why));
        }
        let (mut text, most) = (Vec::new(), metadata.len() as usize + 1);
        reserved(text.try_reserve_exact(most), &what, most)?;
        file.take(most as u64).read_to_end(&mut text).map_err(|error| unread(&what, 0, &error))?;
        if text.len() == most {
            return Err(malformed(&what, "it has grown while it was read; open it again when it is written"));
        }
        // What some editors put before a text: a byte order mark.
        if text.starts_with("\u{feff}".as_bytes()) {
            text.drain(.."\u{feff}".len());
        }
        if let Some(why) = stand_in(&text).filter(|_| !text.trim_ascii_start().starts_with(b"{")) {
            return Err(malformed(&what, why));
        }
        let text = String::from_utf8(text).map_err(|error| no_json(&what, &error.utf8_error()))?;
        brackets(&text).map_err(|said| no_json(&what, &said))?;
        // Most tensors are in the file of the tensor before.
        let (mut files, mut last) = (BTreeSet::new(), "");
        each_pair(&what, &text, |tensor, file| {
            if file == last {
                return Ok(());
            }
            let Some(name) = file_name(file) else {
                let why = format!(
                    "is said to be in {}, which is no name of a file beside the index",
                    shown(file, NAME)
                );
                return Err(blamed(&what, &named(tensor), why));
            };
            last = file;
            files.insert(name);
            if files.len() > FILES {
                return Err(malformed(&what, format!("it names more than {FILES} files; join some of them")));
            }
            Ok(())
        })?;
        if files.is_empty() {
            return Err(malformed(&what, "its \"weight_map\" names no tensor"));
        }
        let paths = files.iter().map(|file| path.with_file_name(file)).collect();
        Ok((paths, Some(Self { files: files.into_iter().collect(), what, text })))
    }
}

/// The error for a file of an index that could not be opened, with the number of those that are missing if it is.
/// `path` is the index's, or that of its folder.
pub(super) fn incomplete(path: &Path, files: &[PathBuf], mut error: Error) -> Error {
    if let Error::Read { kind: ErrorKind::NotFound, text, .. } = &mut error {
        let is_missing = |error: std::io::Error| error.kind() == ErrorKind::NotFound;
        let missing = files.iter().filter(|file| fs::metadata(file).is_err_and(is_missing)).count();
        let (all, path) = (files.len(), path.display());
        *text += &format!(
            "; {missing} of the {all} files that the index of {path} names are missing: the download is incomplete, get \
             the rest"
        );
    }
    error
}

/// Calls `take` with each tensor of an index, and its file, as they stand in the text. (The file has its quotes.)
fn each_pair<'a>(
    what: &str,
    text: &'a str,
    mut take: impl FnMut(&'a str, &'a str) -> Result<()>,
) -> Result<()> {
    if !is_object(text.trim_ascii_start()) {
        return Err(no_map(what));
    }
    let mut is_there = false;
    let told = |said: serde_json::Error, _: Option<&str>| no_json(what, &said);
    entries(text, told, |outer, key, value| match (outer, key) {
        (Some(MAP), tensor) => take(tensor, value),
        (None, MAP) if std::mem::replace(&mut is_there, true) => {
            let twice = "is there twice, and it is unknown which of the two is meant; get the file again";
            Err(malformed(what, format!("its {MAP:?} {twice}")))
        }
        (None, MAP) if !is_object(value) => Err(no_map(what)),
        _ => Ok(()),
    })?;
    if is_there { Ok(()) } else { Err(no_map(what)) }
}

/// The name of a file beside the index. `None`: it is something else, such as a path that leads elsewhere.
fn file_name(value: &str) -> Option<String> {
    let file = text(inside(value)?).ok()?;
    let name = file.strip_prefix("./").unwrap_or(&file);
    let mut parts = Path::new(name).components();
    let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    (is_name && file.len() <= LONGEST_FILE).then(|| file.into_owned())
}

fn no_map(what: &str) -> Error {
    malformed(what, "it has no object \"weight_map\", which says which tensor is in which file")
}

fn no_json(what: &str, said: &dyn std::fmt::Display) -> Error {
    malformed(what, format!("it is no JSON ({said}); get it again"))
}

/// Finds the files that a path stands for.
pub(super) fn find(path: &Path) -> Result<Found> {
    if path.is_dir() {
        return of_folder(path);
    }
    match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
        true => Index::read(path),
        false => Ok((vec![path.to_owned()], None)),
    }
}

/// Whether a file in a folder is its index, by the name: `model.safetensors.index.json`, and with a variant
/// `model.safetensors.index.fp16.json` or `model.safetensors.fp16.index.json`.
fn is_index(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let end = name.split_once(".safetensors.").and_then(|(_, end)| end.strip_suffix(".json"));
    // macOS leaves a hidden file `._NAME` beside each file that it copies.
    !name.starts_with('.') && end.is_some_and(|end| end.split('.').any(|part| part == "index"))
}

fn of_folder(path: &Path) -> Result<Found> {
    let what = path.display().to_string();
    let entries = fs::read_dir(path).map_err(|error| unread(&what, 0, &error))?;
    let (mut files, mut indexes) = (Vec::new(), Vec::new());
    for entry in entries {
        let file = entry.map_err(|error| unread(&what, 0, &error))?.path();
        // A broken link counts as what its name says, and opening it then says what is missing. Without the index, more
        // would be loaded than it names.
        if is_index(&file) {
            indexes.push(file);
        } else if file.extension().is_some_and(|end| end == SUFFIX) && !file.is_dir() {
            files.push(file);
        }
    }
    indexes.sort();
    if indexes.len() > 1 {
        let names: Vec<_> =
            indexes.iter().filter_map(|index| Some(index.file_name()?.to_string_lossy())).collect();
        let names = shown(&names.join(", "), 2 * NAME);
        return Err(malformed(
            &what,
            format!("it has several indexes ({names}); give the path of the one to load"),
        ));
    }
    if let Some(index) = indexes.pop() {
        return Index::read(&index);
    }
    if files.is_empty() {
        let why = format!(
            "there is neither an index (*.{SUFFIX}.index.json) nor a file that ends in .{SUFFIX} in it"
        );
        return Err(malformed(&what, why));
    }
    files.sort();
    complete(&what, &files)?;
    Ok((files, None))
}

/// An error if a file of a numbered set (`model-00002-of-00003`) is missing.
fn complete(what: &str, files: &[PathBuf]) -> Result<()> {
    // For each set, by what its names start with and how many files it has: the numbers that are there.
    let mut sets: BTreeMap<(&str, &str), BTreeSet<u64>> = BTreeMap::new();
    for file in files {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let parts = stem.rsplit_once("-of-").and_then(|(front, of)| Some((front.rsplit_once('-')?, of)));
        let Some(((set, number), of)) = parts else { continue };
        if let Ok(number) = number.parse() {
            sets.entry((set, of)).or_default().insert(number);
        }
    }
    for ((set, of), there) in sets {
        let Ok(count) = of.parse::<u64>() else { continue };
        // Most sets count from one.
        let from = u64::from(!there.contains(&0));
        let all = from..count.saturating_add(from);
        if let Some(missing) = all.clone().find(|number| !there.contains(number)) {
            let (width, lacks) = (of.len(), count - there.range(all).count() as u64);
            let why = format!(
                "{set}-{missing:0width$}-of-{of}.{SUFFIX} is missing in it ({lacks} of the {count} files of its set are): \
                 the download is incomplete, get the rest"
            );
            return Err(malformed(what, why));
        }
    }
    Ok(())
}
