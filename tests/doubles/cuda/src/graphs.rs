//! Captures, the graphs that come of them, and what graphs keep.
//!
//! A graph is a list of copies. Instantiating copies the list, launching queues it. A user object counts its
//! references: of the program, of graphs, of executable graphs, and of launches that are not complete. When the last
//! reference is released its destructor is due, and is called, after the call that released it, on another thread.

#![allow(non_snake_case)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};

use crate::calls::{call, write};
use crate::world::*;

type Destructor = unsafe extern "C" fn(*mut c_void);

#[derive(Clone)]
pub struct Graph {
    nodes: Vec<Op>,
    objects: Vec<usize>,
    capturing: bool,
}

pub struct Object {
    destroy: Destructor,
    pointer: usize,
    references: u64,
}

#[derive(Default)]
pub struct Graphs {
    graphs: BTreeMap<usize, Graph>,
    executables: BTreeMap<usize, Graph>,
    objects: BTreeMap<usize, Object>,
    captures: u64,
    due: Vec<(Destructor, usize)>,
}

thread_local! {
    static DESTRUCTOR: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread calls destructors.
pub fn is_destructor() -> bool {
    DESTRUCTOR.get()
}

/// Calls the destructors that are due, on a thread of their own, without waiting for it.
pub fn run_due() {
    let due = world().as_mut().map(|w| std::mem::take(&mut w.graphs.due)).unwrap_or_default();
    if due.is_empty() {
        return;
    }
    std::thread::spawn(move || {
        DESTRUCTOR.set(true);
        for (destroy, pointer) in due {
            // SAFETY: the call that made the object promised that the two are valid, and the destructor is called once.
            unsafe { destroy(pointer as *mut c_void) };
        }
    });
}

impl Graphs {
    pub fn count(&self) -> usize {
        self.graphs.len() + self.executables.len()
    }

    pub fn objects(&self) -> usize {
        self.objects.len()
    }
}

impl World {
    pub fn add_node(&mut self, graph: usize, op: Op) {
        if let (Some(graph), Op::Copy { .. }) = (self.graphs.graphs.get_mut(&graph), &op) {
            graph.nodes.push(op);
        }
    }

    /// Releases one reference of each of these user objects.
    pub fn let_go(&mut self, objects: &[usize]) {
        for handle in objects {
            let Some(object) = self.graphs.objects.get_mut(handle) else { continue };
            object.references -= 1;
            if object.references == 0 {
                self.graphs.due.push((object.destroy, object.pointer));
                self.graphs.objects.remove(handle);
            }
        }
    }

    pub fn add_references(&mut self, objects: &[usize]) {
        for handle in objects {
            if let Some(object) = self.graphs.objects.get_mut(handle) {
                object.references += 1;
            }
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_uint) -> u32 {
    const NAME: &str = "cuStreamBeginCapture_v2";
    call(NAME, |w| {
        if w.stream(NAME, stream as usize)?.capture.is_some() || mode > 2 {
            return Err(INVALID_VALUE);
        }
        if stream as usize <= 1 {
            w.not_implicit(NAME, stream as usize)?;
            return Err(CAPTURE_UNSUPPORTED);
        }
        let graph = w.fresh();
        w.graphs.graphs.insert(graph, Graph { nodes: Vec::new(), objects: Vec::new(), capturing: true });
        w.graphs.captures += 1;
        let id = w.graphs.captures;
        let capture = Capture { mode, thread: thread(), spoiled: false, graph, id };
        w.stream(NAME, stream as usize)?.capture = Some(capture);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> u32 {
    const NAME: &str = "cuStreamEndCapture";
    call(NAME, |w| {
        let Some(capture) = w.stream(NAME, stream as usize)?.capture.take() else {
            return Err(INVALID_VALUE);
        };
        if capture.mode != 2 && capture.thread != thread() {
            w.stream(NAME, stream as usize)?.capture = Some(Capture { spoiled: true, ..capture });
            return w.violate("CAP-4", format!("{stream:?}"), CAPTURE_WRONG_THREAD);
        }
        let made = if capture.spoiled { 0 } else { capture.graph };
        // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
        unsafe { write(w, NAME, graph, made as *mut c_void) }?;
        if !capture.spoiled {
            if let Some(graph) = w.graphs.graphs.get_mut(&capture.graph) {
                graph.capturing = false;
            }
            return Ok(());
        }
        if let Some(graph) = w.graphs.graphs.remove(&capture.graph) {
            w.let_go(&graph.objects);
        }
        Err(CAPTURE_INVALIDATED)
    })
}

/// What both forms of the question answer: status, number and graph.
#[cfg(not(feature = "cuda11"))]
fn info(w: &mut World, name: &str, stream: *mut c_void) -> Outcome<(c_uint, u64, usize)> {
    let capture = w.stream(name, stream as usize)?.capture.as_ref();
    Ok(capture.map_or((0, 0, 0), |c| if c.spoiled { (2, 0, 0) } else { (1, c.id, c.graph) }))
}

/// Writes what there is a place for.
///
/// # Safety
/// Each pointer is null or valid for a write.
#[cfg(not(feature = "cuda11"))]
unsafe fn answer(
    w: &mut World,
    name: &'static str,
    (status, id, graph): (c_uint, u64, usize),
    to: (*mut c_uint, *mut u64, *mut *mut c_void),
    lists: [*mut *const c_void; 2],
    count: *mut usize,
) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        write(w, name, to.0, status)?;
        if !to.1.is_null() {
            to.1.write(id);
        }
        if !to.2.is_null() {
            to.2.write(graph as *mut c_void);
        }
        for list in lists.into_iter().filter(|list| !list.is_null()) {
            list.write(std::ptr::null());
        }
        if !count.is_null() {
            count.write(0);
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda11"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    stream: *mut c_void,
    status: *mut c_uint,
    id: *mut u64,
    graph: *mut *mut c_void,
    nodes: *mut *const c_void,
    count: *mut usize,
) -> u32 {
    const NAME: &str = "cuStreamGetCaptureInfo_v2";
    call(NAME, |w| {
        let found = info(w, NAME, stream)?;
        // SAFETY: as above.
        unsafe { answer(w, NAME, found, (status, id, graph), [nodes, std::ptr::null_mut()], count) }
    })
}

// Without it the older form is used.
#[cfg(not(any(feature = "cuda11", feature = "cuda12")))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: *mut c_void,
    status: *mut c_uint,
    id: *mut u64,
    graph: *mut *mut c_void,
    nodes: *mut *const c_void,
    edges: *mut *const c_void,
    count: *mut usize,
) -> u32 {
    const NAME: &str = "cuStreamGetCaptureInfo_v3";
    call(NAME, |w| {
        let found = info(w, NAME, stream)?;
        // SAFETY: as above.
        unsafe { answer(w, NAME, found, (status, id, graph), [nodes, edges], count) }
    })
}

#[cfg(not(feature = "cuda11"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuUserObjectCreate(
    object: *mut *mut c_void,
    pointer: *mut c_void,
    destroy: Option<Destructor>,
    references: c_uint,
    flags: c_uint,
) -> u32 {
    const NAME: &str = "cuUserObjectCreate";
    call(NAME, |w| {
        let Some(destroy) = destroy.filter(|_| references > 0 && flags == 1) else {
            return w.violate("GRA-2", format!("{references} references, flags {flags}"), INVALID_VALUE);
        };
        let made = w.fresh();
        // SAFETY: as above.
        unsafe { write(w, NAME, object, made as *mut c_void) }?;
        let object = Object { destroy, pointer: pointer as usize, references: references.into() };
        w.graphs.objects.insert(made, object);
        Ok(())
    })
}

#[cfg(not(feature = "cuda11"))]
#[unsafe(no_mangle)]
extern "C" fn cuUserObjectRelease(object: *mut c_void, count: c_uint) -> u32 {
    call("cuUserObjectRelease", |w| {
        let object = object as usize;
        let Some(references) = w.graphs.objects.get(&object).map(|o| o.references) else {
            return w.violate("GRA-3", format!("no user object {object:#x}"), INVALID_VALUE);
        };
        if u64::from(count) > references || count == 0 {
            return w.violate("GRA-4", format!("{count} of {references} references"), INVALID_VALUE);
        }
        w.let_go(&vec![object; count as usize]);
        Ok(())
    })
}

#[cfg(not(feature = "cuda11"))]
#[unsafe(no_mangle)]
extern "C" fn cuGraphRetainUserObject(
    graph: *mut c_void,
    object: *mut c_void,
    count: c_uint,
    flags: c_uint,
) -> u32 {
    call("cuGraphRetainUserObject", |w| {
        let (graph, object) = (graph as usize, object as usize);
        if !w.graphs.graphs.contains_key(&graph) || !w.graphs.objects.contains_key(&object) {
            return w.violate("GRA-3", format!("graph {graph:#x}, user object {object:#x}"), INVALID_VALUE);
        }
        if count == 0 || flags > 1 {
            return Err(INVALID_VALUE);
        }
        let all = vec![object; count as usize];
        if let Some(graph) = w.graphs.graphs.get_mut(&graph) {
            graph.objects.extend(&all);
        }
        // Or they are the program's own from now on.
        if flags == 0 {
            w.add_references(&all);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> u32 {
    const NAME: &str = "cuGraphInstantiateWithFlags";
    call(NAME, |w| {
        let Some(graph) = w.graphs.graphs.get(&(graph as usize)).filter(|g| !g.capturing).cloned() else {
            return w.violate("GRA-3", format!("{NAME}: {graph:?}"), INVALID_VALUE);
        };
        let made = w.fresh();
        w.add_references(&graph.objects);
        w.graphs.executables.insert(made, graph);
        // SAFETY: as above.
        unsafe { write(w, NAME, executable, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(executable: *mut c_void, stream: *mut c_void) -> u32 {
    const NAME: &str = "cuGraphLaunch";
    call(NAME, |w| {
        let Some(graph) = w.graphs.executables.get(&(executable as usize)).cloned() else {
            return w.violate("GRA-3", format!("{NAME}: {executable:?}"), INVALID_VALUE);
        };
        w.stream(NAME, stream as usize)?;
        w.add_references(&graph.objects);
        for op in graph.nodes.into_iter().chain([Op::Launched(graph.objects)]) {
            w.submit(NAME, stream as usize, op)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(executable: *mut c_void) -> u32 {
    call("cuGraphExecDestroy", |w| match w.graphs.executables.remove(&(executable as usize)) {
        Some(graph) => {
            w.let_go(&graph.objects);
            Ok(())
        }
        None => w.violate("GRA-3", format!("cuGraphExecDestroy: {executable:?}"), INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: *mut c_void) -> u32 {
    call("cuGraphDestroy", |w| match w.graphs.graphs.get(&(graph as usize)).map(|g| g.capturing) {
        Some(true) => w.violate("GRA-4", format!("{graph:?} is being captured"), INVALID_VALUE),
        Some(false) => {
            if let Some(graph) = w.graphs.graphs.remove(&(graph as usize)) {
                w.let_go(&graph.objects);
            }
            Ok(())
        }
        None => w.violate("GRA-3", format!("cuGraphDestroy: {graph:?}"), INVALID_VALUE),
    })
}
