//! A file's header: what it says, and whether that can be.
//!
//! The header is JSON. Its text stays in the file's [`Table`], beside 32 bytes for each tensor
//! ([`Entry`]), less than its description, and a list of all axes: a header that is refused takes
//! at most two and a half times its own bytes of memory, these included.
//!
//! 1. [`Table::describe`] checks whatever concerns one tensor.
//! 2. [`Table::side_by_side`] checks that there are no gaps, no overlaps, and nothing past the end.
//! 3. [`Names`] has the tensors of all files by name.
//!
//! The `safetensors` crate reads what is said of one tensor.

use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorInfo;

use super::json::{LONGEST, entries, named, string};
use super::{beginning, blamed, malformed, read_at, reserved};
use pinpool::{Error, Result};

/// Bytes before the header: its length, as a little-endian number.
const FRONT: u64 = 8;
/// The longest header that the format allows.
pub(super) const LONGEST_HEADER: u64 = 100_000_000;
/// The most axes that a tensor may have: NumPy's arrays have no more (`NPY_MAXDIMS`).
const AXES: usize = 64;
/// The most axes of a file's tensors. A long header may have one for so many of its bytes.
const ALL_AXES: usize = 1 << 16;
const AXIS: usize = 15;
/// The length of the shortest entry of a tensor, which bounds how many a header can have.
const SHORTEST_ENTRY: usize = r#""":{"dtype":"U8","shape":[],"data_offsets":[0,0]},"#.len();

/// What a file's header says: a table of its tensors, in the file's order.
pub(super) struct Table {
    pub(super) path: Box<Path>,
    /// The file's number in the checkpoint.
    pub(super) number: u32,
    /// The header, with the names themselves in the places of those that were written with escapes.
    text: String,
    /// Where the metadata is in it. Empty: it has none.
    metadata: Range<usize>,
    pub(super) entries: Vec<Entry>,
    /// The axes of all tensors, one tensor's behind the other's.
    axes: Vec<usize>,
}

/// A tensor.
pub(super) struct Entry {
    /// Where its name is in the header's text.
    name: u32,
    name_len: u16,
    axes: u8,
    dtype: Dtype,
    /// Where its axes are in the table's list.
    shape: u32,
    /// Whether the checkpoint has it: an index may leave tensors of a file out.
    pub(super) listed: bool,
    /// Its bytes in the file; while the header is checked, behind the header.
    pub(super) from: u64,
    pub(super) to: u64,
}

impl Entry {
    fn name(&self) -> Range<usize> {
        self.name as usize..self.name as usize + usize::from(self.name_len)
    }
}

impl Table {
    /// Reads the header of a file of `file_len` bytes.
    pub(super) fn read(file: &File, path: &Path, file_len: u64, number: u32) -> Result<Self> {
        let what = &*path.display().to_string();
        let no_object = |said: &dyn fmt::Display| {
            let why = format!("its header is no JSON object ({said}); it is no safetensors file, or damaged");
            malformed(what, why)
        };
        // The whole header at once is faster than each of its strings.
        let text = String::from_utf8(header(file, path, file_len)?)
            .map_err(|error| no_object(&error.utf8_error()))?;
        // An axis has two bytes, so a short header cannot have more.
        let axes = (text.len() / 2).min(ALL_AXES.max(text.len() / AXIS));
        let tensors = text.len() / SHORTEST_ENTRY + 1;
        let (mut list, mut sizes) = (Vec::new(), Vec::new());
        reserved(list.try_reserve_exact(tensors), what, tensors * size_of::<Entry>())?;
        reserved(sizes.try_reserve_exact(axes), what, axes * size_of::<usize>())?;
        let (path, none) = (path.into(), String::new());
        let mut table = Self { path, number, text: none, metadata: 0..0, entries: list, axes: sizes };
        // Where a part of the text starts in it.
        let place = |part: &str| part.as_ptr() as usize - text.as_ptr() as usize;
        entries(&text, no_object, |key, value| {
            if key != "\"__metadata__\"" {
                return table.describe(place(key), key, value).map_err(|why| blamed(what, &named(key), why));
            }
            let no_texts = |said: &dyn fmt::Display| {
                malformed(what, format!("its metadata is no object of texts ({said:.400}); get it again"))
            };
            if !table.metadata.is_empty() {
                return Err(no_texts(&"it is there twice"));
            }
            table.metadata = place(value)..place(value) + value.len();
            // Long texts are not read.
            let is_text = |raw: &&str| (raw.len() > LONGEST && raw.starts_with('"')) || string(raw).is_ok();
            entries(if value == "null" { "{}" } else { value }, no_texts, |key, value| {
                if [key, value].iter().all(is_text) { Ok(()) } else { Err(no_texts(&named(key))) }
            })
        })?;
        table.text = text;
        table.unescape();
        // Headers mostly have the file's order already. A tensor without bytes starts where another
        // does, and comes before it.
        let order = |entry: &Entry| (entry.from, entry.to, entry.name);
        if !table.entries.is_sorted_by_key(order) {
            table.entries.sort_unstable_by_key(order);
        }
        let start = FRONT + table.text.len() as u64;
        table.side_by_side(file_len.saturating_sub(start))?;
        for entry in &mut table.entries {
            (entry.from, entry.to) = (start + entry.from, start + entry.to);
        }
        Ok(table)
    }

    /// Adds a tensor whose name stands at a place of the header, or says why not.
    fn describe(&mut self, place: usize, name: &str, value: &str) -> Result<(), String> {
        let undescribed = |said: &dyn fmt::Display| {
            let said = said.to_string();
            format!(
                "is not described as the format asks ({said:.400}); get the file from where it can be trusted, or \
                 upgrade pinpool if the file is of a newer version of the format"
            )
        };
        if string(name).map_err(|said| undescribed(&said))? == "__metadata__" {
            return Err(undescribed(&"metadata is no tensor, and its name has no escapes"));
        }
        if value.len() > LONGEST || !value.starts_with('{') {
            return Err(undescribed(&format_args!("an object of at most {LONGEST} bytes is expected")));
        }
        let TensorInfo { dtype, shape, data_offsets: (from, to) } =
            serde_json::from_str(value).map_err(|said| undescribed(&said))?;
        if shape.len() > AXES || self.axes.len() + shape.len() > self.axes.capacity() {
            return Err(undescribed(&format!("its shape has more than {AXES} axes, or all have too many")));
        }
        // An axis of no elements makes a tensor without any, also where the others would overflow.
        let bits = match shape.contains(&0) {
            true => Some(0),
            false => shape.iter().try_fold(dtype.bitsize(), |bits, axis| bits.checked_mul(*axis)),
        };
        let len = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
        if len.is_none() || len != to.checked_sub(from) {
            return Err(fault(format_args!(
                "is {dtype} of shape {shape:?}, which does not fit bytes {from}..{to}"
            )));
        }
        // A header has at most 100,000,000 bytes, so places in it fit 32 bits.
        self.entries.push(Entry {
            name: place as u32 + 1,
            name_len: (name.len() - 2) as u16,
            axes: shape.len() as u8,
            dtype,
            shape: self.axes.len() as u32,
            listed: true,
            from: from as u64,
            to: to as u64,
        });
        self.axes.extend(shape);
        Ok(())
    }

    /// Writes each name over what the text has for it, which is as long or longer.
    fn unescape(&mut self) {
        let entries = if self.text.contains('\\') { &mut *self.entries } else { &mut [] };
        for entry in entries {
            let Range { start, end } = entry.name();
            let mut name = named(&self.text[start - 1..=end]).into_owned();
            entry.name_len = name.len() as u16;
            name.extend(std::iter::repeat_n(' ', end - start - name.len()));
            self.text.replace_range(start..end, &name);
        }
    }

    /// What messages call its file.
    pub(super) fn what(&self) -> String {
        self.path.display().to_string()
    }

    pub(super) fn name(&self, tensor: u32) -> &str {
        &self.text[self.entries[tensor as usize].name()]
    }

    /// The numbers of its tensors that the checkpoint has.
    pub(super) fn listed(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.entries).filter(|(_, entry)| entry.listed).map(|(number, _)| number)
    }

    /// The metadata, as the header has it.
    pub(super) fn metadata(&self) -> Option<&str> {
        Some(&self.text[self.metadata.clone()]).filter(|text| !text.is_empty() && *text != "null")
    }

    /// Checks tensors, in the order of their offsets, against each other and against the `data`
    /// bytes of the file behind the header.
    fn side_by_side(&self, data: u64) -> Result<()> {
        let (mut end, mut last) = (0, "");
        for entry in &self.entries {
            let (from, to, name) = (entry.from, entry.to, &self.text[entry.name()]);
            if from != end {
                let why = format!(
                    "starts at {from}, and not at {end}, where tensor \"{last:.200}\" before it ends"
                );
                return Err(blamed(&self.what(), name, fault(why)));
            }
            if to > data {
                let why = format!("lies at {from}..{to} of {data} bytes; the file was cut off: get it again");
                return Err(blamed(&self.what(), name, why));
            }
            (end, last) = (to, name);
        }
        if end < data {
            let why = format!("{} bytes at its end belong to no tensor; get it again", data - end);
            return Err(malformed(&self.what(), why));
        }
        Ok(())
    }
}

/// A tensor in a file, as its header describes it, or some of its [rows](Self::rows). A clone is a
/// handle to the same description.
#[derive(Clone)]
pub struct Tensor {
    pub(super) table: Arc<Table>,
    pub(super) index: u32,
    rows: Option<Arc<Rows>>,
}

/// Some rows of a tensor.
struct Rows {
    shape: Vec<usize>,
    /// Their bytes in the file.
    range: Range<u64>,
}

impl Tensor {
    pub(super) fn new(table: Arc<Table>, index: u32) -> Self {
        Self { table, index, rows: None }
    }

    fn entry(&self) -> &Entry {
        &self.table.entries[self.index as usize]
    }

    /// The same tensor, but only these of its rows, which are what its first axis counts. They lie
    /// side by side in the file, so a load of them reads and copies no other bytes.
    ///
    /// ```no_run
    /// # use pinpool_safetensors::Checkpoint;
    /// # fn load(checkpoint: &Checkpoint, copier: &pinpool::Copier) -> pinpool::Result<()> {
    /// // The second of four ranks loads its quarter of the rows, and the other tensors whole.
    /// let ours = |tensor: pinpool_safetensors::Tensor| match tensor.name() {
    ///     "lm_head.weight" => tensor.rows(tensor.shape()[0] / 4..tensor.shape()[0] / 2),
    ///     _ => Ok(tensor),
    /// };
    /// let chosen = checkpoint.tensors().map(ours).collect::<pinpool::Result<Vec<_>>>()?;
    /// let load = checkpoint.loader(copier).only(chosen).start()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] for rows that the tensor does not have, of a single element, and where
    /// types of less than a byte make the rows begin or end within one.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        let (Range { start, end }, Range { start: from, end: to }) = (rows, self.range());
        let refused = |why: String| {
            let name = self.name();
            Err(Error::Argument(format!("rows {start}..{end} of tensor \"{name:.200}\": {why}")))
        };
        let Some((&count, others)) = self.shape().split_first() else {
            return refused("it is a single element; load it whole".into());
        };
        if start > end || end > count {
            return refused(format!("it has {count}; name a range of these"));
        }
        // The product may exceed 64 bits.
        let at = |row: usize| u128::from(to - from) * row as u128;
        if [start, end].iter().any(|row| count > 0 && at(*row) % count as u128 > 0) {
            return refused("they begin or end within a byte; take an even number of rows".into());
        }
        let at = |row: usize| from + (at(row) / count.max(1) as u128) as u64;
        let shape = std::iter::once(end - start).chain(others.iter().copied()).collect();
        let rows = Rows { shape, range: at(start)..at(end) };
        Ok(Self { table: self.table.clone(), index: self.index, rows: Some(rows.into()) })
    }

    /// Its name, unique in its checkpoint. It is as the file has it and may be any text: escape it
    /// (`{:?}`) where it is shown.
    pub fn name(&self) -> &str {
        self.table.name(self.index)
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.entry().dtype
    }

    /// Elements along each axis, those of the last side by side. Empty for a single element.
    pub fn shape(&self) -> &[usize] {
        if let Some(rows) = &self.rows {
            return &rows.shape;
        }
        let entry = self.entry();
        &self.table.axes[entry.shape as usize..][..usize::from(entry.axes)]
    }

    /// The number of its bytes. The format allows tensors without elements, which have none.
    pub fn bytes(&self) -> u64 {
        let Range { start, end } = self.range();
        end - start
    }

    /// The range of its bytes in the file.
    pub fn range(&self) -> Range<u64> {
        match &self.rows {
            Some(rows) => rows.range.clone(),
            None => self.entry().from..self.entry().to,
        }
    }

    /// The same range, counted from behind the header, as the header has it (`data_offsets`).
    pub fn data_offsets(&self) -> Range<u64> {
        // The first tensor starts there: there are no gaps.
        let (Range { start, end }, data) = (self.range(), self.table.entries[0].from);
        start - data..end - data
    }

    /// The path of its file, as it was given or found.
    pub fn file(&self) -> &Path {
        &self.table.path
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}, {}, {:?}, {:?})", self.name(), self.dtype(), self.shape(), self.range())
    }
}

/// Reads the text of a header from a file of `file_len` bytes, which begins with its length.
fn header(file: &File, path: &Path, file_len: u64) -> Result<Vec<u8>> {
    // Checked before memory is asked for. The first bytes behind the length are for messages.
    let start = read_at(file, path, 0, file_len.min(64) as usize)?;
    let why = match start.first_chunk().map(|front| u64::from_le_bytes(*front)) {
        None => "its bytes are too few for a safetensors file, which starts with 8 bytes of length".into(),
        Some(len) if len > LONGEST_HEADER => format!(
            "its header would have {len} bytes, where the format allows {LONGEST_HEADER}: split it into several \
             files, or get it again if it is no safetensors file: it {}",
            beginning(&start)
        ),
        Some(len) if len > file_len - FRONT => {
            format!("its header would have {len} of its {file_len} bytes; it was cut off: get it again")
        }
        Some(len) => return read_at(file, path, FRONT, len as usize),
    };
    Err(malformed(&path.display().to_string(), why))
}

/// A fault of one tensor, with the remedy for a file that is damaged or made to mislead.
fn fault(why: impl fmt::Display) -> String {
    format!("{why}; the file is damaged or made to mislead: get it from where it can be trusted")
}

/// Where a tensor is: the number of its file, and its place in the file's table.
pub(super) type Place = (u32, u32);

/// The tensors of several files by the hashes of their names, sorted.
pub(super) struct Names {
    /// The process's own, so that nobody can make names that collide.
    keys: RandomState,
    list: Vec<(u64, Place)>,
}

impl Names {
    /// (A file has no 2^32 tensors.)
    pub(super) fn of(tables: &[Table]) -> Result<Self> {
        let (keys, mut list) = (RandomState::new(), Vec::new());
        let count = tables.iter().map(|table| table.entries.len()).sum::<usize>();
        let bytes = count.saturating_mul(size_of::<(u64, Place)>());
        reserved(list.try_reserve_exact(count), &tables[0].what(), bytes)?;
        for (shard, table) in (0..).zip(tables) {
            let tensors = 0..table.entries.len() as u32;
            list.extend(tensors.map(|tensor| (keys.hash_one(table.name(tensor)), (shard, tensor))));
        }
        list.sort_unstable();
        Ok(Self { keys, list })
    }

    /// Checks that each name is in a file once, and once in what the checkpoint has of all files.
    pub(super) fn unique(&self, tables: &[Table]) -> Result<()> {
        let name = |(shard, tensor): Place| tables[shard as usize].name(tensor);
        let is_listed = |(shard, tensor): Place| tables[shard as usize].entries[tensor as usize].listed;
        // Tensors of one name lie side by side: two names have one hash of 64 bits hardly ever.
        for pair in self.list.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
            let (first, second) = (pair[0].1, pair[1].1);
            let is_both = first.0 == second.0 || is_listed(first) && is_listed(second);
            if is_both && name(first) == name(second) {
                let why = format!(
                    "is in {} too: it is there twice, and it is unknown which is meant; load the files one by one",
                    tables[first.0 as usize].what()
                );
                return Err(blamed(&tables[second.0 as usize].what(), name(second), why));
            }
        }
        Ok(())
    }

    /// The tensors of a name. `name`: that of a tensor.
    pub(super) fn get<'n>(
        &self,
        wanted: &str,
        name: impl Fn(Place) -> &'n str,
    ) -> impl Iterator<Item = Place> {
        let hash = self.keys.hash_one(wanted);
        let first = self.list.partition_point(|(other, _)| *other < hash);
        let same = self.list[first..].iter().take_while(move |(other, _)| *other == hash);
        same.map(|(_, place)| *place).filter(move |place| name(*place) == wanted)
    }
}
