//! Captures, the graphs that come of them, and what graphs keep.
//!
//! A graph is a list of copies. Instantiating copies the list, launching queues it. A user object counts its
//! references: of the program, of graphs, of executable graphs, and of launches that are not complete. When the last
//! reference is released its destructor is due, and is called, after the call that released it, on another thread.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};

use super::calls::write;
use super::world::*;
use crate::common::entries;

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

/// Calls the destructors that are due in a world, on a thread of their own, without waiting for it.
pub fn run_due(number: usize) {
    let due = std::mem::take(&mut world(number).graphs.due);
    if due.is_empty() {
        return;
    }
    std::thread::spawn(move || {
        DESTRUCTOR.set(true);
        DEFAULT.set(number);
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

entries! {
    cuda;

    fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) in of(stream), |w, name| {
        if w.stream(name, stream)?.capture.is_some() || mode > 2 {
            return Err(INVALID_VALUE);
        }
        if stream <= 1 {
            w.not_implicit(name, stream)?;
            return Err(CAPTURE_UNSUPPORTED);
        }
        let graph = w.fresh();
        w.graphs.graphs.insert(graph, Graph { nodes: Vec::new(), objects: Vec::new(), capturing: true });
        w.graphs.captures += 1;
        let id = w.graphs.captures;
        let capture = Capture { mode, thread: thread(), spoiled: false, graph, id };
        w.stream(name, stream)?.capture = Some(capture);
        Ok(())
    }

    fn cuStreamEndCapture(stream: usize, graph: *mut usize) in of(stream), |w, name| {
        let Some(capture) = w.stream(name, stream)?.capture.take() else {
            return Err(INVALID_VALUE);
        };
        if capture.mode != 2 && capture.thread != thread() {
            w.stream(name, stream)?.capture = Some(Capture { spoiled: true, ..capture });
            return w.violate("CAP-4", format!("{stream:#x}"), CAPTURE_WRONG_THREAD);
        }
        let made = if capture.spoiled { 0 } else { capture.graph };
        write(w, name, graph, made)?;
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
    }
}

/// Answers both forms of the question, where there are places for the answers. There are no lists of nodes and edges.
///
/// # Safety
/// Each pointer is null or valid for a write.
unsafe fn info(
    w: &mut World,
    name: &'static str,
    stream: usize,
    status: *mut c_uint,
    id: *mut u64,
    [graph, none @ ..]: [*mut usize; 4],
) -> Outcome {
    let capture = w.stream(name, stream)?.capture.as_ref();
    let found = capture.map_or((0, 0, 0), |c| if c.spoiled { (2, 0, 0) } else { (1, c.id, c.graph) });
    // SAFETY: the caller's promise.
    unsafe {
        write(w, name, status, found.0)?;
        id.as_mut().into_iter().for_each(|id| *id = found.1);
        graph.as_mut().into_iter().for_each(|graph| *graph = found.2);
        none.iter().filter_map(|place| place.as_mut()).for_each(|place| *place = 0);
    }
    Ok(())
}

entries! {
    cuda;

    fn cuStreamGetCaptureInfo_v2(
        stream: usize,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut usize,
        count: *mut usize,
    ) in of(stream), |w, name| {
        info(w, name, stream, status, id, [graph, nodes, std::ptr::null_mut(), count])
    }

    /// Without it the older form is used.
    fn cuStreamGetCaptureInfo_v3(
        stream: usize,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut usize,
        edges: *mut usize,
        count: *mut usize,
    ) in of(stream), |w, name| {
        info(w, name, stream, status, id, [graph, nodes, edges, count])
    }

    fn cuUserObjectCreate(
        object: *mut usize,
        pointer: usize,
        destroy: Option<Destructor>,
        references: c_uint,
        flags: c_uint,
    ) in here(), |w, name| {
        let Some(destroy) = destroy.filter(|_| references > 0 && flags == 1) else {
            return w.violate("GRA-2", format!("{references} references, flags {flags}"), INVALID_VALUE);
        };
        let made = w.fresh();
        write(w, name, object, made)?;
        let object = Object { destroy, pointer, references: references.into() };
        w.graphs.objects.insert(made, object);
        Ok(())
    }

    fn cuUserObjectRelease(object: usize, count: c_uint) in of(object), |w, name| {
        let Some(references) = w.graphs.objects.get(&object).map(|o| o.references) else {
            return w.violate("GRA-3", format!("no user object {object:#x}"), INVALID_VALUE);
        };
        if u64::from(count) > references || count == 0 {
            return w.violate("GRA-4", format!("{count} of {references} references"), INVALID_VALUE);
        }
        w.let_go(&vec![object; count as usize]);
        Ok(())
    }

    fn cuGraphRetainUserObject(
        graph: usize,
        object: usize,
        count: c_uint,
        flags: c_uint,
    ) in of(graph), |w, name| {
        let (graph, object) = (graph, object);
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
    }

    fn cuGraphInstantiateWithFlags(
        executable: *mut usize,
        graph: usize,
        _flags: u64,
    ) in of(graph), |w, name| {
        let Some(graph) = w.graphs.graphs.get(&(graph)).filter(|g| !g.capturing).cloned() else {
            return w.violate("GRA-3", format!("{name}: {graph:#x}"), INVALID_VALUE);
        };
        let made = w.fresh();
        w.add_references(&graph.objects);
        w.graphs.executables.insert(made, graph);
        write(w, name, executable, made)
    }

    fn cuGraphLaunch(executable: usize, stream: usize) in of(stream), |w, name| {
        let Some(graph) = w.graphs.executables.get(&(executable)).cloned() else {
            return w.violate("GRA-3", format!("{name}: {executable:#x}"), INVALID_VALUE);
        };
        w.stream(name, stream)?;
        w.add_references(&graph.objects);
        for op in graph.nodes.into_iter().chain([Op::Launched(graph.objects)]) {
            w.submit(name, stream, op)?;
        }
        Ok(())
    }

    fn cuGraphExecDestroy(executable: usize) in of(executable), |w, name| {
        match w.graphs.executables.remove(&(executable)) {
            Some(graph) => {
                w.let_go(&graph.objects);
                Ok(())
            }
            None => w.violate("GRA-3", format!("cuGraphExecDestroy: {executable:#x}"), INVALID_VALUE),
        }
    }

    fn cuGraphDestroy(graph: usize) in of(graph), |w, name| {
        match w.graphs.graphs.get(&(graph)).map(|g| g.capturing) {
            Some(true) => w.violate("GRA-4", format!("{graph:#x} is being captured"), INVALID_VALUE),
            Some(false) => {
                if let Some(graph) = w.graphs.graphs.remove(&(graph)) {
                    w.let_go(&graph.objects);
                }
                Ok(())
            }
            None => w.violate("GRA-3", format!("cuGraphDestroy: {graph:#x}"), INVALID_VALUE),
        }
    }
}
