//! Recursive-descent parser over the tokens.

use super::lexer::{Tok, Token, tokenize};
use super::{Ast, Function, Operand, PtxError, RawInst, Space, Stmt, Ty, Var};

/// Parses a PTX module.
///
/// # Errors
/// [`PtxError`] with line and text of the first statement that is not PTX as this crate knows it.
pub fn parse(src: &str) -> Result<Ast, PtxError> {
    let toks = tokenize(src)?;
    Parser { src, toks, at: 0 }.module()
}

struct Parser<'a> {
    src: &'a str,
    toks: Vec<Token>,
    at: usize,
}

type Res<T> = Result<T, PtxError>;

fn space_of(word: &str) -> Option<Space> {
    Some(match word {
        ".global" => Space::Global,
        ".const" => Space::Const,
        ".shared" => Space::Shared,
        ".local" => Space::Local,
        ".param" => Space::Param,
        _ => return None,
    })
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&Tok> {
        self.toks.get(self.at).map(|t| &t.tok)
    }

    fn peek_word(&self) -> Option<&str> {
        match self.peek() {
            Some(Tok::Word(w)) => Some(w),
            _ => None,
        }
    }

    fn line(&self) -> u32 {
        self.toks.get(self.at.min(self.toks.len().saturating_sub(1))).map_or(0, |t| t.line)
    }

    fn err<T>(&self, message: impl Into<String>) -> Res<T> {
        let line = self.line();
        let text = self.src.lines().nth(line.saturating_sub(1) as usize).unwrap_or("").trim().to_string();
        Err(PtxError { line, message: message.into(), text })
    }

    fn is(&self, c: char) -> bool {
        self.peek() == Some(&Tok::P(c))
    }

    fn eat(&mut self, c: char) -> bool {
        let hit = self.is(c);
        if hit {
            self.at += 1;
        }
        hit
    }

    fn want(&mut self, c: char) -> Res<()> {
        if self.eat(c) { Ok(()) } else { self.err(format!("expected `{c}`")) }
    }

    fn word(&mut self) -> Res<String> {
        match self.peek() {
            Some(Tok::Word(w)) => {
                let w = w.clone();
                self.at += 1;
                Ok(w)
            }
            _ => self.err("expected a name"),
        }
    }

    fn int(&mut self) -> Res<i128> {
        let neg = self.eat('-');
        match self.peek() {
            Some(Tok::Int(v)) => {
                let v = *v;
                self.at += 1;
                Ok(if neg { -v } else { v })
            }
            _ => self.err("expected an integer"),
        }
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.at < self.toks.len() && self.toks[self.at].line == line {
            self.at += 1;
        }
    }

    fn skip_until_semicolon(&mut self) {
        while self.at < self.toks.len() && !self.eat(';') {
            self.at += 1;
        }
    }

    fn skip_braces(&mut self) {
        let mut depth = 0;
        while self.at < self.toks.len() {
            if self.is('{') {
                depth += 1;
            } else if self.is('}') {
                depth -= 1;
                if depth == 0 {
                    self.at += 1;
                    return;
                }
            }
            self.at += 1;
        }
    }

    fn module(mut self) -> Res<Ast> {
        let mut ast = Ast::default();
        while let Some(tok) = self.peek().cloned() {
            let Tok::Word(w) = tok else {
                if self.eat(';') {
                    continue;
                }
                return self.err("expected a directive");
            };
            match w.as_str() {
                ".version" => {
                    self.at += 1;
                    let (s, e) = (self.toks[self.at].start, self.toks[self.at].end);
                    ast.version = self.src[s..e].to_string();
                    self.skip_line();
                }
                ".target" => {
                    self.at += 1;
                    ast.target = self.word()?;
                    self.skip_line();
                }
                ".address_size" | ".file" | ".loc" => self.skip_line(),
                ".section" => {
                    self.at += 1;
                    self.skip_braces();
                }
                ".alias" | ".pragma" => self.skip_until_semicolon(),
                ".visible" | ".extern" | ".weak" | ".entry" | ".func" | ".common" | ".global" | ".const"
                | ".shared" => {
                    self.top_level(&mut ast)?;
                }
                _ => return self.err("unknown directive at module scope"),
            }
        }
        Ok(ast)
    }

    fn top_level(&mut self, ast: &mut Ast) -> Res<()> {
        let mut is_extern = false;
        loop {
            match self.peek_word() {
                Some(".visible" | ".weak" | ".common") => self.at += 1,
                Some(".extern") => {
                    is_extern = true;
                    self.at += 1;
                }
                _ => break,
            }
        }
        match self.peek_word() {
            Some(".entry" | ".func") => {
                let f = self.function()?;
                ast.functions.retain(|g| g.name != f.name || g.has_body);
                if f.has_body || !ast.functions.iter().any(|g| g.name == f.name) {
                    ast.functions.push(f);
                }
            }
            Some(w) if space_of(w).is_some() => {
                let mut vars = self.var_decl(is_extern)?;
                ast.vars.append(&mut vars);
            }
            _ => return self.err("expected a function or variable"),
        }
        Ok(())
    }

    fn function(&mut self) -> Res<Function> {
        let is_entry = self.word()? == ".entry";
        let mut f = Function {
            name: String::new(),
            is_entry,
            returns: vec![],
            params: vec![],
            body: vec![],
            reqntid: None,
            maxntid: None,
            reqnctapercluster: None,
            has_body: false,
        };
        if !is_entry && self.is('(') {
            f.returns = self.param_list()?;
        }
        f.name = self.word()?;
        if self.is('(') {
            f.params = self.param_list()?;
        }
        loop {
            if self.is('{') {
                self.at += 1;
                f.body = self.body()?;
                f.has_body = true;
                return Ok(f);
            }
            if self.eat(';') {
                return Ok(f);
            }
            let w = self.word()?;
            match w.as_str() {
                ".maxntid" => f.maxntid = Some(self.dims()?),
                ".reqntid" => f.reqntid = Some(self.dims()?),
                ".reqnctapercluster" => f.reqnctapercluster = Some(self.dims()?),
                ".minnctapersm"
                | ".maxnreg"
                | ".maxclusterrank"
                | ".maxnctapersm"
                | ".abi_preserve"
                | ".abi_preserve_control" => {
                    self.int()?;
                }
                ".explicitcluster" | ".noreturn" | ".blocksareclusters" => {}
                ".pragma" => self.skip_until_semicolon(),
                _ => {
                    self.at -= 1;
                    return self.err(format!("unknown function directive {w}"));
                }
            }
        }
    }

    fn dims(&mut self) -> Res<[u32; 3]> {
        let mut d = [1u32; 3];
        for (i, v) in d.iter_mut().enumerate() {
            if i > 0 && !self.eat(',') {
                break;
            }
            *v = self.int()? as u32;
        }
        Ok(d)
    }

    fn param_list(&mut self) -> Res<Vec<Var>> {
        self.want('(')?;
        let mut out = vec![];
        while !self.eat(')') {
            match self.peek_word() {
                Some(".reg") => {
                    self.at += 1;
                    let ty = self.ty()?;
                    let name = self.word()?;
                    out.push(Var {
                        name,
                        space: Space::Param,
                        ty,
                        align: ty.bytes(),
                        size: ty.bytes(),
                        init: vec![],
                        is_extern: false,
                    });
                }
                _ => out.append(&mut self.var_decl_one(false)?),
            }
            self.eat(',');
        }
        Ok(out)
    }

    fn ty(&mut self) -> Res<Ty> {
        let w = self.word()?;
        match Ty::parse(w.trim_start_matches('.')) {
            Some(t) => Ok(t),
            None => {
                self.at -= 1;
                self.err(format!("unknown type {w}"))
            }
        }
    }

    fn var_decl(&mut self, is_extern: bool) -> Res<Vec<Var>> {
        let v = self.var_decl_one(is_extern)?;
        self.want(';')?;
        Ok(v)
    }

    /// One declaration without its semicolon; several names may share a type outside parameter lists.
    fn var_decl_one(&mut self, is_extern: bool) -> Res<Vec<Var>> {
        let w = self.word()?;
        let Some(space) = space_of(&w) else {
            self.at -= 1;
            return self.err("expected a state space");
        };
        let mut align = 0usize;
        let mut ty = None;
        loop {
            match self.peek_word().map(str::to_string).as_deref() {
                Some(".align") => {
                    self.at += 1;
                    align = self.int()? as usize;
                }
                // Qualifiers of pointer parameters carry no layout.
                Some(".ptr") => {
                    self.at += 1;
                    while let Some(q) = self.peek_word() {
                        if space_of(q).is_some() {
                            self.at += 1;
                        } else if q == ".align" {
                            self.at += 1;
                            self.int()?;
                        } else {
                            break;
                        }
                    }
                }
                Some(".attribute") => {
                    self.at += 1;
                    self.want('(')?;
                    while !self.eat(')') {
                        self.at += 1;
                    }
                }
                Some(".v2" | ".v4") => return self.err("vector variables are not supported"),
                Some(s) if s.starts_with('.') => ty = Some(self.ty()?),
                _ => break,
            }
        }
        let Some(ty) = ty else { return self.err("variable without a type") };
        let mut out = vec![];
        loop {
            let name = self.word()?;
            let mut count: Option<usize> = None;
            while self.eat('[') {
                let n = if self.is(']') { 0 } else { self.int()? as usize };
                self.want(']')?;
                count = Some(count.map_or(n, |c| c * n));
            }
            let size = ty.bytes() * count.unwrap_or(1);
            let mut init = vec![];
            if self.eat('=') {
                self.initializer(ty, &mut init)?;
            }
            let size = size.max(init.len());
            if !init.is_empty() {
                init.resize(size, 0);
            }
            out.push(Var { name, space, ty, align: align.max(ty.bytes()), size, init, is_extern });
            // In a parameter list the comma belongs to the list.
            if space == Space::Param || !self.eat(',') {
                break;
            }
        }
        Ok(out)
    }

    fn initializer(&mut self, ty: Ty, out: &mut Vec<u8>) -> Res<()> {
        if self.eat('{') {
            while !self.eat('}') {
                self.initializer(ty, out)?;
                self.eat(',');
            }
            return Ok(());
        }
        let neg = self.eat('-');
        let bits = match self.peek().cloned() {
            Some(Tok::Int(v)) => {
                self.at += 1;
                let v = if neg { -v } else { v };
                if ty.is_float() { (v as f64).to_bits() } else { v as u64 }
            }
            Some(Tok::Float(v, w)) => {
                self.at += 1;
                match (w, ty.bits) {
                    (32, 32) | (64, 64) => v,
                    (64, 32) => u64::from((f64::from_bits(v) as f32).to_bits()),
                    _ => return self.err("float initializer of another width"),
                }
            }
            _ => return self.err("initializers with symbols are not supported"),
        };
        out.extend_from_slice(&bits.to_le_bytes()[..ty.bytes()]);
        Ok(())
    }

    fn body(&mut self) -> Res<Vec<Stmt>> {
        let mut out = vec![];
        loop {
            if self.eat('}') {
                return Ok(out);
            }
            if self.eat('{') {
                out.push(Stmt::Scope(self.body()?));
                continue;
            }
            if self.eat(';') {
                continue;
            }
            let Some(tok) = self.peek().cloned() else { return self.err("end of text inside a body") };
            match tok {
                Tok::P('@') => out.push(self.inst()?),
                Tok::Word(w) => match w.as_str() {
                    ".reg" => {
                        self.at += 1;
                        let ty = self.ty()?;
                        let mut names = vec![];
                        loop {
                            let name = self.word()?;
                            let count = if self.eat('<') {
                                let n = self.int()? as u32;
                                self.want('>')?;
                                Some(n)
                            } else {
                                None
                            };
                            names.push((name, count));
                            if !self.eat(',') {
                                break;
                            }
                        }
                        self.want(';')?;
                        out.push(Stmt::Reg(ty, names));
                    }
                    ".pragma" => self.skip_until_semicolon(),
                    ".loc" | ".file" => self.skip_line(),
                    _ if space_of(&w).is_some() => {
                        out.extend(self.var_decl(false)?.into_iter().map(Stmt::Var));
                    }
                    _ if matches!(self.toks.get(self.at + 1).map(|t| &t.tok), Some(Tok::P(':'))) => {
                        self.at += 2;
                        match self.peek_word() {
                            Some(".branchtargets") => {
                                self.at += 1;
                                let mut targets = vec![self.word()?];
                                while self.eat(',') {
                                    targets.push(self.word()?);
                                }
                                self.want(';')?;
                                out.push(Stmt::BranchTargets(w, targets));
                            }
                            Some(".callprototype") => self.skip_until_semicolon(),
                            _ => out.push(Stmt::Label(w)),
                        }
                    }
                    _ if w.starts_with('.') => return self.err("unknown directive in a body"),
                    _ => out.push(self.inst()?),
                },
                _ => return self.err("unexpected token"),
            }
        }
    }

    fn inst(&mut self) -> Res<Stmt> {
        let start = self.toks[self.at].start;
        let line = self.line();
        let guard = if self.eat('@') {
            let neg = self.eat('!');
            Some((self.word()?, neg))
        } else {
            None
        };
        let opcode = self.word()?;
        let parts: Vec<String> = opcode.split('.').map(str::to_string).collect();
        let mut operands = vec![];
        while !self.is(';') {
            operands.push(self.operand()?);
            if !self.eat(',') {
                break;
            }
        }
        let end = self.toks.get(self.at).map_or(self.src.len(), |t| t.end);
        self.want(';')?;
        let text = self.src[start..end].split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(Stmt::Inst(RawInst { guard, parts, operands, line, text }))
    }

    fn operand(&mut self) -> Res<Operand> {
        let first = self.primary()?;
        if self.eat('|') {
            let second = self.primary()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn primary(&mut self) -> Res<Operand> {
        if self.eat('!') {
            return Ok(Operand::Not(Box::new(self.primary()?)));
        }
        if self.eat('{') {
            let mut v = vec![];
            while !self.eat('}') {
                v.push(self.primary()?);
                self.eat(',');
            }
            return Ok(Operand::Vector(v));
        }
        if self.eat('(') {
            let mut v = vec![];
            while !self.eat(')') {
                v.push(self.primary()?);
                self.eat(',');
            }
            return Ok(Operand::Group(v));
        }
        if self.eat('[') {
            let base = self.primary()?;
            let (base, offset) = match base {
                Operand::Offset(b, o) => (b, o),
                b => (Box::new(b), 0),
            };
            let mut extra = vec![];
            while self.eat(',') {
                extra.push(self.primary()?);
            }
            self.want(']')?;
            return Ok(Operand::Mem { base, offset, extra });
        }
        let neg = self.eat('-');
        let Some(tok) = self.peek().cloned() else { return self.err("expected an operand") };
        self.at += 1;
        match tok {
            Tok::Int(v) => Ok(Operand::Int(if neg { -v } else { v })),
            Tok::Float(bits, w) => {
                let sign = if w == 32 { 1u64 << 31 } else { 1u64 << 63 };
                Ok(Operand::Float(if neg { bits ^ sign } else { bits }, w))
            }
            Tok::Word(w) if !neg => {
                let mut offset = 0i64;
                let mut seen = false;
                while self.is('+')
                    || (self.is('-') && matches!(self.toks.get(self.at + 1).map(|t| &t.tok), Some(Tok::Int(_))))
                {
                    seen = true;
                    if self.eat('+') {
                        offset += self.int()? as i64;
                    } else {
                        self.at += 1;
                        offset -= self.int()? as i64;
                    }
                }
                let name = Operand::Name(w);
                Ok(if seen { Operand::Offset(Box::new(name), offset) } else { name })
            }
            _ => {
                self.at -= 1;
                self.err("expected an operand")
            }
        }
    }
}
